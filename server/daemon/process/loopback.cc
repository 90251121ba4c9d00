#include "server/daemon/process/loopback.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <cerrno>
#include <memory>

#include "absl/strings/match.h"
#include "absl/strings/strip.h"
#include "base/unique_fd.h"

namespace dmuond::server {
namespace {

bool IsLoopbackAddress(const sockaddr& address) {
  if (address.sa_family == AF_INET) {
    const auto& in = reinterpret_cast<const sockaddr_in&>(address);
    return (ntohl(in.sin_addr.s_addr) >> 24) == IN_LOOPBACKNET;
  }
  if (address.sa_family != AF_INET6) return false;
  const in6_addr& in = reinterpret_cast<const sockaddr_in6&>(address).sin6_addr;
  return IN6_IS_ADDR_LOOPBACK(&in) || (IN6_IS_ADDR_V4MAPPED(&in) && in.s6_addr[12] == 127);
}

using Addresses = std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)>;

// `host` may be an IPv6 address in brackets. Null: it cannot be resolved.
Addresses Resolve(const std::string& host) {
  const std::string name(absl::StripSuffix(absl::StripPrefix(host, "["), "]"));
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (::getaddrinfo(name.c_str(), nullptr, &hints, &found) != 0) found = nullptr;
  return {found, &::freeaddrinfo};
}

// By binding, to a port of the kernel's choice. Only an answer that is about the address counts:
// link-local addresses need an interface beside them, and descriptors may be used up.
bool IsOfThisMachine(const addrinfo& address) {
  const wire::UniqueFd socket(::socket(address.ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!socket.valid()) return errno != EAFNOSUPPORT;
  return ::bind(socket.get(), address.ai_addr, address.ai_addrlen) == 0 || errno != EADDRNOTAVAIL;
}

}  // namespace

bool IsLoopbackHost(const std::string& host) {
  return absl::StartsWith(host, "127.") || host == "localhost" || host == "[::1]" || host == "::1";
}

std::string LoopbackAddressOf(const std::string& host) {
  const Addresses found = Resolve(host);
  if (found == nullptr) return "";
  for (const addrinfo* next = found.get(); next != nullptr; next = next->ai_next) {
    if (!IsLoopbackAddress(*next->ai_addr)) return "";
  }
  char text[NI_MAXHOST] = {};
  if (::getnameinfo(found->ai_addr, found->ai_addrlen, text, sizeof(text), nullptr, 0,
                    NI_NUMERICHOST) != 0) {
    return "";
  }
  return text;
}

bool LeadsElsewhere(const std::string& host) {
  const Addresses found = Resolve(host);
  for (const addrinfo* next = found.get(); next != nullptr; next = next->ai_next) {
    if (IsOfThisMachine(*next)) return false;
  }
  return found != nullptr;
}

}  // namespace dmuond::server
