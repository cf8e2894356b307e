package deps

import (
	_ "github.com/anishathalye/porcupine"
	_ "github.com/apache/pulsar-client-go/pulsar"
	_ "github.com/cockroachdb/pebble/v2"
	_ "github.com/google/go-cmp/cmp"
	_ "github.com/hashicorp/raft"
	_ "github.com/hashicorp/raft-boltdb/v2"
	_ "github.com/magiconair/properties"
	_ "github.com/planetscale/vtprotobuf/protohelpers"
	_ "github.com/prometheus/client_golang/prometheus/promauto"
	_ "github.com/prometheus/client_golang/prometheus/promhttp"
	_ "github.com/spf13/cobra"
	_ "go.etcd.io/bbolt"
	_ "go.uber.org/goleak"
	_ "golang.org/x/sync/errgroup"
	_ "google.golang.org/grpc"
	_ "google.golang.org/protobuf/proto"
)
