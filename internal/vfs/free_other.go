//go:build !linux && !darwin

package vfs

import "math"

// free cannot be told on this system, so that no write is refused for lack of space.
func free(string) (int64, error) { return math.MaxInt64, nil }
