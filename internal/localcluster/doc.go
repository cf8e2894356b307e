// Package localcluster runs a whole cluster, three bookies and two brokers, as
// real processes on the loopback interface of one machine: for trying things,
// and for tests that kill them. The program behind scripts/cluster is a thin
// layer of flags over it.
//
// A [Cluster] is a directory. Everything about the cluster is in it (data, logs,
// pid files, the settings it was started with), so that one program may start the
// cluster and another kill a bookie of it an hour later.
//
//	DIR/cluster.json         name, ports, settings; written by the first Up
//	DIR/bookie-1/            the data of bookie 1
//	DIR/log/bookie-1.log     what bookie 1 wrote to stdout and stderr
//	DIR/run/bookie-1.pid     process id and start time
//
// # Ports
//
// All ports follow from the port base N, by default 6650. Process i listens on
//
//	broker: Pulsar protocol N+10(i-1)      HTTP N+1430+10(i-1)
//	bookie: inter-node      N+5+10(i-1)    HTTP N+1435+10(i-1)
//
// so that a cluster fills N to N+25 and N+1430 to N+1455, and the next one may
// begin at N+30.
//
// # Processes
//
// The processes are detached: they outlive the program that started them. A
// process is signalled only if the process with the recorded id also has the
// recorded start time, so that a recycled id is never hit. Kill is SIGKILL, Stop
// is SIGTERM and waits.
//
// # Concurrency
//
// Methods are safe for concurrent use as long as no two of them work on the same
// process. For each process that it starts, a Cluster has one goroutine that
// reaps it; the goroutine ends with the process.
package localcluster
