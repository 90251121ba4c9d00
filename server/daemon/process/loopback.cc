#include "server/daemon/process/loopback.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <memory>

#include "absl/strings/match.h"
#include "absl/strings/strip.h"

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

}  // namespace

bool IsLoopbackHost(const std::string& host) {
  return absl::StartsWith(host, "127.") || host == "localhost" || host == "[::1]" || host == "::1";
}

std::string LoopbackAddressOf(const std::string& host) {
  const std::string name(absl::StripSuffix(absl::StripPrefix(host, "["), "]"));
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (::getaddrinfo(name.c_str(), nullptr, &hints, &found) != 0) return "";
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> owned(found, &::freeaddrinfo);
  for (const addrinfo* next = found; next != nullptr; next = next->ai_next) {
    if (!IsLoopbackAddress(*next->ai_addr)) return "";
  }
  char text[NI_MAXHOST] = {};
  if (::getnameinfo(found->ai_addr, found->ai_addrlen, text, sizeof(text), nullptr, 0,
                    NI_NUMERICHOST) != 0) {
    return "";
  }
  return text;
}

}  // namespace dmuond::server
