#include "server/daemon/memory/nccl_variables.h"

#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>

#include "absl/strings/str_cat.h"

namespace dmuond::server {
namespace {

constexpr char kHostId[] = "NCCL_HOSTID";
constexpr char kInterface[] = "NCCL_SOCKET_IFNAME";

bool IsLoopback(const sockaddr& address) {
  if (address.sa_family == AF_INET) {
    const auto& in = reinterpret_cast<const sockaddr_in&>(address);
    return ntohl(in.sin_addr.s_addr) >> 24 == IN_LOOPBACKNET;
  }
  return address.sa_family == AF_INET6 &&
         IN6_IS_ADDR_LOOPBACK(&reinterpret_cast<const sockaddr_in6&>(address).sin6_addr);
}

bool SameAddress(const sockaddr& a, const sockaddr& b) {
  if (a.sa_family != b.sa_family) return false;
  if (a.sa_family == AF_INET) {
    return reinterpret_cast<const sockaddr_in&>(a).sin_addr.s_addr ==
           reinterpret_cast<const sockaddr_in&>(b).sin_addr.s_addr;
  }
  return a.sa_family == AF_INET6 &&
         std::memcmp(&reinterpret_cast<const sockaddr_in6&>(a).sin6_addr,
                     &reinterpret_cast<const sockaddr_in6&>(b).sin6_addr, sizeof(in6_addr)) == 0;
}

// Whether the interface's address is this one. All of 127.0.0.0/8 is the loopback interface's.
bool Has(const ifaddrs& interface, const sockaddr& address) {
  if (interface.ifa_addr == nullptr) return false;
  if (IsLoopback(address)) return (interface.ifa_flags & IFF_LOOPBACK) != 0;
  return SameAddress(*interface.ifa_addr, address);
}

absl::StatusOr<std::string> InterfaceOf(const std::string& host) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (const int error = ::getaddrinfo(host.c_str(), nullptr, &hints, &found); error != 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("--rail_address=", host, ": ", ::gai_strerror(error)));
  }
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> addresses(found, ::freeaddrinfo);
  ifaddrs* listed = nullptr;
  if (::getifaddrs(&listed) != 0) return absl::ErrnoToStatus(errno, "getifaddrs");
  const std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> interfaces(listed, ::freeifaddrs);
  for (const addrinfo* address = found; address != nullptr; address = address->ai_next) {
    for (const ifaddrs* interface = listed; interface != nullptr; interface = interface->ifa_next) {
      if (Has(*interface, *address->ai_addr)) return std::string(interface->ifa_name);
    }
  }
  return absl::FailedPreconditionError(absl::StrCat(
      "--rail_address=", host, ": no network interface of this host has that address. ", kInterface,
      " in the daemon's environment names one for lanes on GPUs"));
}

}  // namespace

absl::StatusOr<NodeDevice::Variables> NcclVariables(const std::string& rail_address) {
  NodeDevice::Variables variables;
  if (std::getenv(kHostId) == nullptr) {
    std::string boot_id;
    std::ifstream("/proc/sys/kernel/random/boot_id") >> boot_id;
    if (!boot_id.empty()) variables.emplace_back(kHostId, boot_id);
  }
  if (std::getenv(kInterface) == nullptr) {
    const absl::StatusOr<std::string> interface = InterfaceOf(rail_address);
    if (!interface.ok()) return interface.status();
    variables.emplace_back(kInterface, absl::StrCat("=", *interface));  // "=": not a prefix
  }
  return variables;
}

}  // namespace dmuond::server
