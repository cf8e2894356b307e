package assemble

import "runtime/debug"

// Version is the module's version, or for a build from a checkout the commit.
func Version() string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "unknown"
	}
	if v := info.Main.Version; v != "" && v != "(devel)" {
		return v
	}
	version := "devel"
	for _, s := range info.Settings {
		if s.Key == "vcs.revision" {
			version += "-" + s.Value[:min(12, len(s.Value))]
		}
		if s.Key == "vcs.modified" && s.Value == "true" {
			version += "+changes"
		}
	}
	return version
}
