package raftlog

import (
	"context"
	"fmt"
	"io"
	"log" //nolint:depguard // a method of hclog.Logger returns one
	"log/slog"
	"slices"

	"github.com/hashicorp/go-hclog"
)

// raftLogger gives hashicorp/raft's log lines to slog, one level lower than raft
// says: an unreachable peer is an error to raft and a warning to an operator.
type raftLogger struct {
	log  *slog.Logger
	name string
	args []any
}

var _ hclog.Logger = (*raftLogger)(nil)

func newRaftLogger(l *slog.Logger) hclog.Logger { return &raftLogger{log: l.With("source", "raft")} }

func slogLevel(l hclog.Level) slog.Level {
	switch l {
	case hclog.Error:
		return slog.LevelWarn
	case hclog.Warn:
		return slog.LevelInfo
	default:
		return slog.LevelDebug
	}
}

// Log implements [hclog.Logger].
func (r *raftLogger) Log(level hclog.Level, msg string, args ...any) {
	l := slogLevel(level)
	ctx := context.Background()
	if !r.log.Enabled(ctx, l) {
		return
	}
	attrs := make([]slog.Attr, 0, (len(args)+1)/2)
	for i := 0; i+1 < len(args); i += 2 {
		key := fmt.Sprint(args[i])
		if key == "error" {
			key = "err"
		}
		attrs = append(attrs, slog.Any(key, rendered(args[i+1])))
	}
	r.log.LogAttrs(ctx, l, msg, attrs...) //nolint:sloglint // raft's messages are constants, there
}

// rendered spells hclog's deferred formats and raft's types.
func rendered(v any) any {
	switch v := v.(type) {
	case hclog.Format:
		if len(v) == 0 {
			return ""
		}
		format, _ := v[0].(string)
		return fmt.Sprintf(format, v[1:]...)
	case error:
		return v.Error()
	case fmt.Stringer:
		return v.String()
	default:
		return v
	}
}

// Trace implements [hclog.Logger].
func (r *raftLogger) Trace(msg string, args ...any) { r.Log(hclog.Trace, msg, args...) }

// Debug implements [hclog.Logger].
func (r *raftLogger) Debug(msg string, args ...any) { r.Log(hclog.Debug, msg, args...) }

// Info implements [hclog.Logger].
func (r *raftLogger) Info(msg string, args ...any) { r.Log(hclog.Info, msg, args...) }

// Warn implements [hclog.Logger].
func (r *raftLogger) Warn(msg string, args ...any) { r.Log(hclog.Warn, msg, args...) }

// Error implements [hclog.Logger].
func (r *raftLogger) Error(msg string, args ...any) { r.Log(hclog.Error, msg, args...) }

func (r *raftLogger) enabled(l hclog.Level) bool {
	return r.log.Enabled(context.Background(), slogLevel(l))
}

// IsTrace implements [hclog.Logger].
func (r *raftLogger) IsTrace() bool { return r.enabled(hclog.Trace) }

// IsDebug implements [hclog.Logger].
func (r *raftLogger) IsDebug() bool { return r.enabled(hclog.Debug) }

// IsInfo implements [hclog.Logger].
func (r *raftLogger) IsInfo() bool { return r.enabled(hclog.Info) }

// IsWarn implements [hclog.Logger].
func (r *raftLogger) IsWarn() bool { return r.enabled(hclog.Warn) }

// IsError implements [hclog.Logger].
func (r *raftLogger) IsError() bool { return r.enabled(hclog.Error) }

// ImpliedArgs implements [hclog.Logger].
func (r *raftLogger) ImpliedArgs() []any { return r.args }

// With implements [hclog.Logger].
func (r *raftLogger) With(args ...any) hclog.Logger {
	return &raftLogger{log: r.log.With(args...), name: r.name, args: append(slices.Clip(r.args), args...)}
}

// Name implements [hclog.Logger].
func (r *raftLogger) Name() string { return r.name }

// Named implements [hclog.Logger].
func (r *raftLogger) Named(name string) hclog.Logger {
	return &raftLogger{log: r.log, name: name, args: r.args}
}

// ResetNamed implements [hclog.Logger].
func (r *raftLogger) ResetNamed(name string) hclog.Logger { return r.Named(name) }

// SetLevel implements [hclog.Logger]. The slog handler decides.
func (r *raftLogger) SetLevel(hclog.Level) {}

// GetLevel implements [hclog.Logger].
func (r *raftLogger) GetLevel() hclog.Level {
	for _, l := range []hclog.Level{hclog.Debug, hclog.Warn, hclog.Error} {
		if r.enabled(l) {
			return l
		}
	}
	return hclog.Off
}

// StandardLogger implements [hclog.Logger]; raft does not use it.
func (r *raftLogger) StandardLogger(*hclog.StandardLoggerOptions) *log.Logger {
	return log.New(io.Discard, "", 0)
}

// StandardWriter implements [hclog.Logger]; raft does not use it.
func (r *raftLogger) StandardWriter(*hclog.StandardLoggerOptions) io.Writer { return io.Discard }
