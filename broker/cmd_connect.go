package broker

import (
	"errors"
	"fmt"

	"github.com/magnetar-io/magnetar/protocol"
	"github.com/magnetar-io/magnetar/protocol/pulsarpb"
)

// serverVersion is what clients are told they talk to.
const serverVersion = "Magnetar"

// connect serves CONNECT: the first command of a connection, and its only one of
// the kind. The connection speaks the lower of both sides' protocol versions.
//
// Ignored: authentication (there is none yet, so nobody is refused for it) and
// proxy_to_broker_url (this broker is no proxy).
func (c *conn) connect(f protocol.Frame) error {
	cmd := f.Command.GetConnect()
	if c.connected {
		return badRequest(noRequest, errors.New("CONNECT came twice on one connection"))
	}
	if len(cmd.GetClientVersion()) > maxNameLength {
		return badRequest(noRequest, fmt.Errorf("client version of %d bytes: at most %d are allowed", len(cmd.GetClientVersion()), maxNameLength))
	}
	if cmd.GetProtocolVersion() < 0 {
		return &violation{
			noRequest, pulsarpb.ServerError_UnsupportedVersionError,
			fmt.Errorf("protocol version %d: want 0 or more", cmd.GetProtocolVersion()),
		}
	}
	c.version = min(cmd.GetProtocolVersion(), protocolVersion)
	c.client = cmd.GetClientVersion()
	c.connected = true

	version, maxMessage, serverName := c.version, int32(c.b.cfg.MaxMessageSize), serverVersion
	yes, no := true, false
	c.out.reply(&pulsarpb.BaseCommand{
		Type: pulsarpb.BaseCommand_CONNECTED.Enum(),
		Connected: &pulsarpb.CommandConnected{
			ServerVersion: &serverName, ProtocolVersion: &version, MaxMessageSize: &maxMessage,
			FeatureFlags: &pulsarpb.FeatureFlags{
				SupportsTopicWatchers:                             &no,
				SupportsGetPartitionedMetadataWithoutAutoCreation: &yes,
			},
		},
	})
	return nil
}

// ping serves PING.
func (c *conn) ping(protocol.Frame) error {
	c.out.reply(&pulsarpb.BaseCommand{Type: pulsarpb.BaseCommand_PONG.Enum(), Pong: &pulsarpb.CommandPong{}})
	return nil
}

// pong serves PONG: that it came is all it says.
func (c *conn) pong(protocol.Frame) error { return nil }
