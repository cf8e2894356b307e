package assemble

import "github.com/magnetar-io/magnetar/internal/config"

//go:generate go run ../samples ../../../configs

// Sample is one of the files in configs/.
type Sample struct {
	File   string
	Header string
	Keys   *config.Set
}

// sampleNote is what every sample says about itself.
const sampleNote = `

Every key is here with its default; delete what you do not change. A key given with --set key=value on the command line counts more than this file. An unknown key or a value out of range stops the start.

This file is made from the program by ` + "`go generate ./...`" + `; copy it before you change it.`

// Samples returns the sample configuration of each program.
func Samples() []Sample {
	var (
		bookie     BookieConfig
		broker     BrokerConfig
		standalone StandaloneConfig
	)
	return []Sample{
		{"bookie.conf", "The bookie, a storage node: bookie --config FILE." + sampleNote, bookie.Keys()},
		{"broker.conf", "The broker: broker --config FILE." + sampleNote, broker.Keys()},
		{"standalone.conf", "A bookie and a broker in one process: magnetar standalone --config FILE." + sampleNote, standalone.Keys()},
	}
}
