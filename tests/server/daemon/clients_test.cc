#include "server/daemon/calls/clients.h"

#include <gtest/gtest.h>
#include <sys/socket.h>

#include <array>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "base/unique_fd.h"
#include "server/daemon/calls/attach_server.h"
#include "tests/server/daemon/support.h"

namespace dmuond::server {
namespace {

// Its successor waits for that process.
TEST(ClientsTest, ASessionThatIsRefusedDoesNotHideTheRanksLastProcess) {
  const TempDir dir;
  const auto attach = AttachServer::Start({.path = dir / "d.sock.attach"}, {});
  ASSERT_TRUE(attach.ok()) << attach.status();
  std::array<int, 2> pair{};
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair.data()), 0);
  const wire::UniqueFd ours(pair[0]);
  const wire::UniqueFd theirs(pair[1]);
  const auto process = std::make_shared<TrainerProcess>(PeerOf(ours.get()));
  Clients clients;
  clients.Bind(attach->get());
  const auto open = [&](uint64_t id) {
    Client client;
    client.id = id;
    client.process = process;
    clients.Add(std::move(client));
  };
  open(1);
  clients.OnEnded({.id = 1});
  EXPECT_EQ(clients.ProcessOf(1), process);
  open(2);
  clients.OnEnded({.id = 2, .told = absl::PermissionDeniedError("another user's")});
  EXPECT_EQ(clients.ProcessOf(1), process);
  open(3);
  clients.OnEnded({.id = 3});
  EXPECT_EQ(clients.ProcessOf(3), process);
  EXPECT_EQ(clients.ProcessOf(1), nullptr) << "a newer one";
}

}  // namespace
}  // namespace dmuond::server
