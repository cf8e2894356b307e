package metadatatest

import (
	"testing"

	"go.uber.org/goleak"

	"github.com/magnetar-io/magnetar/metadata"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestMemory(t *testing.T) {
	store := NewMemory(t)
	Run(t, func() metadata.Store { return store })
}
