package handshake

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"strconv"
	"time"
)

const (
	// Version is the protocol version that this build speaks. Both sides must
	// speak the same one.
	Version = 1

	// HelloTimeout bounds a hello, from an established connection to its answer.
	HelloTimeout = 5 * time.Second

	// MaxField bounds, in bytes, a cluster name, a cluster id and a node identity.
	MaxField = 255

	maxReason   = 2048 // bytes of a refusal's sentence
	maxBody     = 4096 // bytes of a frame's body; above every real one
	headerBytes = 8
	crcBytes    = 4
)

var (
	magic   = [4]byte{'M', 'G', 'N', 'T'}
	castle  = crc32.MakeTable(crc32.Castagnoli)
	errBody = errors.New("hello body does not parse")
)

// Service is what a connection is for.
type Service uint8

const (
	// Raft is hashicorp/raft's protocol of one group.
	Raft Service = 1

	// Storage is a bookie's gRPC services. Its group is 0.
	Storage Service = 2

	// probe asks only whether the wanted node is there; see [Probe].
	probe Service = 3
)

// String names the service in errors and logs.
func (s Service) String() string {
	switch s {
	case Raft:
		return "raft"
	case Storage:
		return "storage"
	case probe:
		return "probe"
	default:
		return "service " + strconv.Itoa(int(s))
	}
}

// Self is how one side of a connection introduces itself.
type Self struct {
	Cluster   string // the cluster's name, never empty
	ClusterID string // the cluster's UUID; "" as long as the node does not know it
	Node      string // a bookie's name@diskUUID, a broker's id; never empty
}

// String spells who it is, for the sentences of a refusal.
func (s Self) String() string {
	id := s.ClusterID
	if id == "" {
		id = "not known yet"
	}
	return fmt.Sprintf("node %q of cluster %q (id %s)", s.Node, s.Cluster, id)
}

func (s Self) verify() error {
	if s.Cluster == "" || s.Node == "" {
		return fmt.Errorf("hello of %v: cluster name and node identity must not be empty", s)
	}
	for _, f := range []string{s.Cluster, s.ClusterID, s.Node} {
		if len(f) > MaxField {
			return fmt.Errorf("hello field %.32q… has %d bytes: want at most %d", f, len(f), MaxField)
		}
	}
	return nil
}

// Target is what the dialling side wants.
type Target struct {
	Node    string // the identity that must answer; "" is whoever does
	Service Service
	Group   uint32 // 0 for Storage
}

// mismatch returns the sentence for two sides that do not belong together, ""
// for two that do. by is the side that judges.
func mismatch(by, other Self) string {
	switch {
	case by.Cluster != other.Cluster:
		return fmt.Sprintf("%v refuses %v: the cluster names differ", by, other)
	case by.ClusterID != "" && other.ClusterID != "" && by.ClusterID != other.ClusterID:
		return fmt.Sprintf("%v refuses %v: the names agree but these are two clusters, formatted apart", by, other)
	}
	return ""
}

// frame kinds.
const (
	kindHello   = 1
	kindWelcome = 2
	kindRefusal = 3
)

type hello struct {
	self Self
	to   Target
}

func (h hello) encode() []byte {
	b := appendSelf(nil, h.self)
	b = appendString(b, h.to.Node)
	b = append(b, byte(h.to.Service))
	return binary.BigEndian.AppendUint32(b, h.to.Group)
}

func parseHello(b []byte) (hello, error) {
	p := parser{b: b}
	h := hello{self: p.self()}
	h.to.Node = p.string(MaxField)
	h.to.Service = Service(p.byte())
	h.to.Group = p.uint32()
	return h, p.end()
}

func parseWelcome(b []byte) (Self, error) {
	p := parser{b: b}
	s := p.self()
	return s, p.end()
}

func parseRefusal(b []byte) (string, error) {
	p := parser{b: b}
	s := p.string(maxReason)
	return s, p.end()
}

func appendSelf(b []byte, s Self) []byte {
	b = appendString(b, s.Cluster)
	b = appendString(b, s.ClusterID)
	return appendString(b, s.Node)
}

func appendString(b []byte, s string) []byte {
	b = binary.BigEndian.AppendUint16(b, uint16(len(s)))
	return append(b, s...)
}

// parser reads a body's fields. After the first missing byte it yields zero
// values; end reports that, and bytes left over.
type parser struct {
	b   []byte
	bad bool
}

func (p *parser) take(n int) []byte {
	if p.bad || len(p.b) < n {
		p.bad = true
		return nil
	}
	b := p.b[:n]
	p.b = p.b[n:]
	return b
}

func (p *parser) byte() byte {
	if b := p.take(1); b != nil {
		return b[0]
	}
	return 0
}

func (p *parser) uint32() uint32 {
	if b := p.take(4); b != nil {
		return binary.BigEndian.Uint32(b)
	}
	return 0
}

func (p *parser) string(limit int) string {
	b := p.take(2)
	if b == nil {
		return ""
	}
	n := int(binary.BigEndian.Uint16(b))
	if n > limit {
		p.bad = true
		return ""
	}
	return string(p.take(n))
}

func (p *parser) self() Self {
	return Self{Cluster: p.string(MaxField), ClusterID: p.string(MaxField), Node: p.string(MaxField)}
}

func (p *parser) end() error {
	if p.bad || len(p.b) > 0 {
		return errBody
	}
	return nil
}

// versionError is a frame that another protocol version wrote.
type versionError struct{ theirs byte }

func (e *versionError) Error() string {
	return fmt.Sprintf("peer speaks inter-node protocol version %d, this node speaks %d: run versions that agree", e.theirs, Version)
}

// errStranger is a peer that does not speak this protocol at all.
var errStranger = errors.New("not an inter-node connection: it does not open with the inter-node magic")

func writeFrame(w io.Writer, kind byte, body []byte) error {
	b := make([]byte, 0, headerBytes+len(body)+crcBytes)
	b = append(b, magic[:]...)
	b = append(b, Version, kind)
	b = binary.BigEndian.AppendUint16(b, uint16(len(body)))
	b = append(b, body...)
	b = binary.BigEndian.AppendUint32(b, crc32.Checksum(b, castle))
	_, err := w.Write(b)
	return err
}

// readFrame reads exactly one frame and not a byte more.
func readFrame(r io.Reader) (kind byte, body []byte, err error) {
	var head [headerBytes]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return 0, nil, fmt.Errorf("read hello: %w", err)
	}
	if [4]byte(head[:4]) != magic {
		return 0, nil, errStranger
	}
	if head[4] != Version {
		return 0, nil, &versionError{theirs: head[4]}
	}
	n := int(binary.BigEndian.Uint16(head[6:]))
	if n > maxBody {
		return 0, nil, fmt.Errorf("hello body of %d bytes: want at most %d", n, maxBody)
	}
	rest := make([]byte, n+crcBytes)
	if _, err := io.ReadFull(r, rest); err != nil {
		return 0, nil, fmt.Errorf("read hello: %w", err)
	}
	sum := crc32.Update(crc32.Checksum(head[:], castle), castle, rest[:n])
	if got := binary.BigEndian.Uint32(rest[n:]); got != sum {
		return 0, nil, fmt.Errorf("hello checksum is %08x: want %08x", got, sum)
	}
	return head[5], rest[:n], nil
}
