#include "server/daemon/daemon.h"

namespace dmuond::server {

void Daemon::Bind(AttachServer* attach, PeerLinks* peers) {
  core_.attach = attach;
  core_.peers = peers;
  StateLock lock(core_.mutex);
  core_.clients.Bind(attach);
}

bool Daemon::formed() {
  StateLock lock(core_.mutex);
  return core_.job.epoch() != 0;
}

}  // namespace dmuond::server
