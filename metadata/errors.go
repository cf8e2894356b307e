package metadata

import (
	"errors"
	"fmt"
	"time"
	"unicode/utf8"

	"google.golang.org/grpc/codes"

	"github.com/magnetar-io/magnetar/internal/rpc"
	"github.com/magnetar-io/magnetar/ledger"
)

// What a caller must tell apart. The error that wraps one names the key and the
// versions.
var (
	// ErrNotFound reports that the key is absent.
	ErrNotFound = errors.New("key not found")

	// ErrBadVersion reports that the key is not at the version the caller wanted:
	// somebody else wrote it. Read it again and decide anew.
	ErrBadVersion = errors.New("key is at another version")

	// ErrLeaseExpired reports a lease that has ended. Grant a new one; the keys
	// of the old one are gone.
	ErrLeaseExpired = errors.New("lease expired")

	// ErrUnknownOutcome reports a change that may or may not have happened: the
	// context ended before an answer came. Read the key to know.
	ErrUnknownOutcome = ledger.ErrUnknownOutcome

	// ErrUnavailable reports that nobody could be asked. Nothing was changed.
	ErrUnavailable = ledger.ErrUnavailable

	// ErrInvalid reports arguments beyond the limits: a bug in the caller.
	ErrInvalid = rpc.ErrInvalid
)

// The kinds by which the errors above cross the wire.
func init() {
	rpc.RegisterKind(rpc.Failure_KEY_NOT_FOUND, ErrNotFound, codes.NotFound)
	rpc.RegisterKind(rpc.Failure_BAD_VERSION, ErrBadVersion, codes.FailedPrecondition)
	rpc.RegisterKind(rpc.Failure_LEASE_EXPIRED, ErrLeaseExpired, codes.FailedPrecondition)
}

// CheckKey returns an [ErrInvalid] unless key may be written.
func CheckKey(key string) error {
	if key == "" {
		return fmt.Errorf("key is empty: %w", ErrInvalid)
	}
	return CheckPrefix(key)
}

// CheckPrefix returns an [ErrInvalid] unless prefix may be ranged over. The
// empty prefix is that of all keys.
func CheckPrefix(prefix string) error {
	if len(prefix) > MaxKeyBytes {
		return fmt.Errorf("key %.40q… has %d bytes, at most %d are allowed: %w", prefix, len(prefix), MaxKeyBytes, ErrInvalid)
	}
	if !utf8.ValidString(prefix) {
		return fmt.Errorf("key %q is not UTF-8: %w", prefix, ErrInvalid)
	}
	return nil
}

// CheckValue returns an [ErrInvalid] unless value may be put at key.
func CheckValue(key string, value []byte) error {
	if len(value) > MaxValueBytes {
		return fmt.Errorf("value of %q has %d bytes, at most %d are allowed: %w", key, len(value), MaxValueBytes, ErrInvalid)
	}
	return nil
}

// CheckTTL returns an [ErrInvalid] unless a lease may have this TTL.
func CheckTTL(ttl time.Duration) error {
	if ttl < MinTTL || ttl > MaxTTL || ttl%time.Millisecond != 0 {
		return fmt.Errorf("lease TTL is %v, allowed are %v to %v in whole milliseconds: %w", ttl, MinTTL, MaxTTL, ErrInvalid)
	}
	return nil
}

// CheckIf returns an [ErrInvalid] unless v may be a condition.
func CheckIf(key string, v Version) error {
	if v < AnyVersion {
		return fmt.Errorf("version %d for %q: want -1 for any, 0 for absent, or a version: %w", v, key, ErrInvalid)
	}
	return nil
}

// CheckLimit returns an [ErrInvalid] unless limit may bound a range.
func CheckLimit(limit int) error {
	if limit < 1 || limit > MaxRange {
		return fmt.Errorf("range limit is %d, allowed are 1 to %d: %w", limit, MaxRange, ErrInvalid)
	}
	return nil
}
