package raftlog

import (
	"bytes"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
)

// Identity says which cluster a directory belongs to and which member it is.
type Identity struct {
	Cluster   string // the cluster's name
	ClusterID string // the cluster's UUID, made by Format
	Name      string // the bookie's name
	Disk      string // the directory's UUID
	Groups    int    // ledger groups; with the metadata group there is one more
}

// Node returns the node identity, name@diskUUID. It is the Raft ServerID.
func (i Identity) Node() string { return i.Name + "@" + i.Disk }

const (
	identityFile    = "identity.json"
	lockFile        = "LOCK"
	groupsDir       = "groups"
	identityVersion = 1

	dirMode  = 0o750
	fileMode = 0o600

	// MaxGroups bounds the ledger groups of a cluster.
	MaxGroups = 64
)

// identityRecord is the file's content. See docs/formats/identity.md.
type identityRecord struct {
	Version   int    `json:"version"`
	Cluster   string `json:"cluster"`
	ClusterID string `json:"clusterId"`
	Name      string `json:"name"`
	Disk      string `json:"disk"`
	Groups    int    `json:"ledgerGroups"`
	// Founder marks the one directory that Format made: its first open creates
	// every group with this node as the only voter.
	Founder bool `json:"founder"`
	// Ready is set once every group's log exists. From then on a missing log is
	// damage, never a reason to make a new one.
	Ready bool   `json:"ready"`
	Sum   string `json:"crc32c"`
}

func (r identityRecord) identity() Identity {
	return Identity{Cluster: r.Cluster, ClusterID: r.ClusterID, Name: r.Name, Disk: r.Disk, Groups: r.Groups}
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

func (r identityRecord) checksum() string {
	r.Sum = ""
	b, err := json.Marshal(r)
	if err != nil {
		panic(fmt.Sprintf("raftlog: identity does not encode: %v", err))
	}
	return fmt.Sprintf("%08x", crc32.Checksum(b, castagnoli))
}

// Format makes dir the first member of a new cluster with that many ledger
// groups (1 to [MaxGroups]). dir must be absent or empty. Format exactly one
// bookie: the others start on empty directories and join.
func Format(dir, cluster, name string, groups int) (Identity, error) {
	if err := errors.Join(checkName("cluster name", cluster), checkName("bookie name", name)); err != nil {
		return Identity{}, err
	}
	if groups < 1 || groups > MaxGroups {
		return Identity{}, fmt.Errorf("ledgerGroups is %d: want 1 to %d", groups, MaxGroups)
	}
	if err := os.MkdirAll(dir, dirMode); err != nil {
		return Identity{}, fmt.Errorf("format %s: %w", dir, err)
	}
	lock, err := lockDir(dir)
	if err != nil {
		return Identity{}, err
	}
	defer func() { _ = lock.Close() }()
	entries, err := os.ReadDir(dir)
	if err != nil {
		return Identity{}, fmt.Errorf("format %s: %w", dir, err)
	}
	for _, e := range entries {
		// A Format that was cut off leaves the temporary file of the identity.
		if e.Name() != lockFile && e.Name() != "lost+found" && e.Name() != identityFile+".tmp" {
			return Identity{}, fmt.Errorf("format %s: the directory is not empty (it holds %q): format an empty one, or start the bookie on it as it is", dir, e.Name())
		}
	}
	r := identityRecord{Cluster: cluster, ClusterID: newUUID(), Name: name, Disk: newUUID(), Groups: groups, Founder: true}
	if err := saveIdentity(dir, r); err != nil {
		return Identity{}, err
	}
	return r.identity(), nil
}

// OpenIdentity reads dir's identity. It reports false for a directory that has
// none because nothing was ever opened in it.
func OpenIdentity(dir string) (Identity, bool, error) {
	r, ok, err := loadIdentity(dir)
	return r.identity(), ok, err
}

func loadIdentity(dir string) (identityRecord, bool, error) {
	path := filepath.Join(dir, identityFile)
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		if _, err := os.Stat(filepath.Join(dir, groupsDir)); err == nil {
			return identityRecord{}, false, fmt.Errorf("%s is missing, but %s holds logs: restore the file, or empty the directory to rejoin as a new disk", path, filepath.Join(dir, groupsDir))
		}
		return identityRecord{}, false, nil
	}
	if err != nil {
		return identityRecord{}, false, fmt.Errorf("read identity: %w", err)
	}
	r, err := parseIdentity(b)
	if err != nil {
		return identityRecord{}, false, fmt.Errorf("identity %s: %w", path, err)
	}
	return r, true, nil
}

func parseIdentity(b []byte) (identityRecord, error) {
	var v struct {
		Version int `json:"version"`
	}
	if err := json.Unmarshal(b, &v); err != nil {
		return identityRecord{}, fmt.Errorf("not JSON: %w", err)
	}
	if v.Version != identityVersion {
		return identityRecord{}, fmt.Errorf("format version %d: this program reads version %d only; run the release that wrote it", v.Version, identityVersion)
	}
	var r identityRecord
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	if err := d.Decode(&r); err != nil {
		return identityRecord{}, err
	}
	if want := r.checksum(); r.Sum != want {
		return identityRecord{}, fmt.Errorf("checksum is %q, the content's is %q: the file was damaged or edited", r.Sum, want)
	}
	if r.Cluster == "" || r.ClusterID == "" || r.Name == "" || r.Disk == "" || r.Groups < 1 || r.Groups > MaxGroups {
		return identityRecord{}, errors.New("a field is empty or out of range")
	}
	return r, nil
}

func saveIdentity(dir string, r identityRecord) error {
	r.Version = identityVersion
	r.Sum = r.checksum()
	b, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return fmt.Errorf("encode identity: %w", err)
	}
	if err := replaceFile(filepath.Join(dir, identityFile), append(b, '\n')); err != nil {
		return fmt.Errorf("write identity: %w", err)
	}
	return nil
}

// lockDir takes the directory's lock until the returned file is closed, or the
// process ends.
func lockDir(dir string) (*os.File, error) {
	path := filepath.Join(dir, lockFile)
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, fileMode)
	if err != nil {
		return nil, fmt.Errorf("lock %s: %w", dir, err)
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		_ = f.Close()
		return nil, fmt.Errorf("lock %s: %w: another process has this directory open", path, err)
	}
	return f, nil
}

// replaceFile writes path so that a crash leaves the old content or the new.
func replaceFile(path string, content []byte) error {
	tmp := path + ".tmp"
	f, err := os.OpenFile(tmp, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, fileMode)
	if err != nil {
		return err
	}
	_, err = f.Write(content)
	if err == nil {
		err = f.Sync()
	}
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err != nil {
		_ = os.Remove(tmp)
		return err
	}
	if err := os.Rename(tmp, path); err != nil {
		return err
	}
	return syncDir(filepath.Dir(path))
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	err = d.Sync()
	if cerr := d.Close(); err == nil {
		err = cerr
	}
	return err
}

// newUUID returns a random (version 4) UUID.
func newUUID() string {
	var b [16]byte
	_, _ = rand.Read(b[:]) // never fails: it ends the program first
	b[6] = b[6]&0x0f | 0x40
	b[8] = b[8]&0x3f | 0x80
	h := hex.EncodeToString(b[:])
	return h[:8] + "-" + h[8:12] + "-" + h[12:16] + "-" + h[16:20] + "-" + h[20:]
}
