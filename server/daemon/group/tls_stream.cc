#include "server/daemon/group/tls_stream.h"

#include <arpa/inet.h>
#include <openssl/err.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "dmuond/wire/start_thread.h"
#include "server/daemon/group/openssl_objects.h"

namespace dmuond::server {
namespace {

constexpr char kBindingLabel[] = "EXPORTER-dmuond-peer";
constexpr size_t kBindingBytes = 32;

// An authority that signs any DNS name has not said whose address its text may be.
bool IsAddress(const std::string& text) {
  in6_addr address{};
  return ::inet_pton(AF_INET, text.c_str(), &address) == 1 ||
         ::inet_pton(AF_INET6, text.c_str(), &address) == 1;
}

}  // namespace

TlsStream::TlsStream(const TlsContext& context, wire::UniqueFd socket, const Patience& patience)
    : socket_(std::move(socket)), patience_(patience), ssl_(SSL_new(context.get())) {
  if (ssl_ != nullptr) SSL_set_fd(ssl_.get(), socket_.get());
}

template <typename Step>
absl::Status TlsStream::Until(const Step& step) {
  if (ssl_ == nullptr) return absl::ResourceExhaustedError("OpenSSL has no memory");
  for (;;) {
    ERR_clear_error();
    const int result = step(ssl_.get());
    if (result > 0) return absl::OkStatus();
    const int error = SSL_get_error(ssl_.get(), result);
    if (error != SSL_ERROR_WANT_READ && error != SSL_ERROR_WANT_WRITE) {
      // OpenSSL says only that a certificate is not trusted; its own look says why.
      const int64_t verified = SSL_get_verify_result(ssl_.get());
      std::string why = WhatOpenSslSays();
      if (verified != X509_V_OK) {
        absl::StrAppend(&why, ": ", X509_verify_cert_error_string(verified));
      }
      return absl::UnavailableError(absl::StrCat("TLS: ", why));
    }
    const short events = error == SSL_ERROR_WANT_READ ? POLLIN : POLLOUT;
    if (absl::Status waited = patience_.WaitFor(socket_.get(), events); !waited.ok()) return waited;
  }
}

absl::StatusOr<std::unique_ptr<TlsStream>> TlsStream::Accept(const TlsContext& context,
                                                             wire::UniqueFd socket,
                                                             const Patience& patience) {
  std::unique_ptr<TlsStream> stream(new TlsStream(context, std::move(socket), patience));
  if (absl::Status shaken = stream->Until(SSL_accept); !shaken.ok()) return shaken;
  return stream;
}

absl::StatusOr<std::unique_ptr<TlsStream>> TlsStream::Connect(const TlsContext& context,
                                                              wire::UniqueFd socket,
                                                              const std::string& host,
                                                              const Patience& patience) {
  std::unique_ptr<TlsStream> stream(new TlsStream(context, std::move(socket), patience));
  if (SSL* const ssl = stream->ssl_.get(); ssl != nullptr && !host.empty()) {
    const bool is_address = X509_VERIFY_PARAM_set1_ip_asc(SSL_get0_param(ssl), host.c_str()) == 1;
    ERR_clear_error();
    SSL_set_hostflags(ssl, X509_CHECK_FLAG_NO_PARTIAL_WILDCARDS);
    if (!is_address && (SSL_set1_host(ssl, host.c_str()) != 1 ||
                        SSL_set_tlsext_host_name(ssl, host.c_str()) != 1)) {
      return absl::UnavailableError(absl::StrCat("TLS takes no host '", host, "'"));
    }
  }
  if (absl::Status shaken = stream->Until(SSL_connect); !shaken.ok()) return shaken;
  return stream;
}

absl::Status TlsStream::Read(char* data, size_t size) {
  while (size > 0) {
    size_t got = 0;
    absl::Status read = Until([&](SSL* ssl) { return SSL_read_ex(ssl, data, size, &got); });
    if (!read.ok()) return read;
    data += got;
    size -= got;
  }
  return absl::OkStatus();
}

absl::Status TlsStream::Write(absl::string_view data) {
  while (!data.empty()) {
    size_t put = 0;
    absl::Status written =
        Until([&](SSL* ssl) { return SSL_write_ex(ssl, data.data(), data.size(), &put); });
    if (!written.ok()) return written;
    data.remove_prefix(put);
  }
  return absl::OkStatus();
}

std::string TlsStream::Binding() const {
  std::string binding(kBindingBytes, '\0');
  // It fails only before hands were shaken. A proof that covered no connection would hold for any.
  if (SSL_export_keying_material(ssl_.get(), reinterpret_cast<unsigned char*>(binding.data()),
                                 binding.size(), kBindingLabel, sizeof(kBindingLabel) - 1, nullptr,
                                 0, 0) != 1) {
    std::abort();
  }
  return binding;
}

std::vector<std::string> TlsStream::PeerNames() const {
  std::vector<std::string> names;
  const Certificate certificate(SSL_get1_peer_certificate(ssl_.get()));
  if (certificate == nullptr) return names;
  const GeneralNames all(static_cast<GENERAL_NAMES*>(
      X509_get_ext_d2i(certificate.get(), NID_subject_alt_name, nullptr, nullptr)));
  for (int i = 0; all != nullptr && i < sk_GENERAL_NAME_num(all.get()); ++i) {
    const GENERAL_NAME& name = *sk_GENERAL_NAME_value(all.get(), i);
    if (name.type == GEN_DNS) {
      const auto* text = reinterpret_cast<const char*>(ASN1_STRING_get0_data(name.d.dNSName));
      std::string dns_name(text, static_cast<size_t>(ASN1_STRING_length(name.d.dNSName)));
      if (!IsAddress(dns_name)) names.push_back(std::move(dns_name));
    } else if (name.type == GEN_IPADD) {
      const int family = ASN1_STRING_length(name.d.iPAddress) == 4 ? AF_INET : AF_INET6;
      const bool whole = family == AF_INET || ASN1_STRING_length(name.d.iPAddress) == 16;
      std::array<char, INET6_ADDRSTRLEN> text{};
      if (whole && ::inet_ntop(family, ASN1_STRING_get0_data(name.d.iPAddress), text.data(),
                               text.size()) != nullptr) {
        names.emplace_back(text.data());
      }
    }
  }
  return names;
}

// Carries bytes until both directions have ended, one has broken, or it goes.
class TlsPump {
 public:
  TlsPump(std::unique_ptr<TlsStream> tls, wire::UniqueFd local, wire::UniqueFd stop)
      : tls_(std::move(tls)), local_(std::move(local)), stop_(std::move(stop)) {}
  ~TlsPump() {
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = ::write(stop_.get(), &one, sizeof(one));
    if (thread_.joinable()) thread_.join();
  }
  TlsPump(const TlsPump&) = delete;
  TlsPump& operator=(const TlsPump&) = delete;
  // RESOURCE_EXHAUSTED: there is no thread for it.
  absl::Status Start() {
    absl::StatusOr<std::thread> thread = wire::StartThread("a connection with TLS", [this] {
      Run();
      // Closed by whoever joins this thread; the other ends see the end now.
      ::shutdown(local_.get(), SHUT_RDWR);
      ::shutdown(tls_->socket_.get(), SHUT_RDWR);
      done_.store(true);
    });
    if (!thread.ok()) return thread.status();
    thread_ = *std::move(thread);
    return absl::OkStatus();
  }
  [[nodiscard]] bool done() const { return done_.load(); }

 private:
  // One direction.
  struct Buffer {
    std::array<char, 64 << 10> bytes;
    size_t begin = 0;
    size_t end = 0;
    [[nodiscard]] bool empty() const { return begin == end; }
    void Fill(size_t count) {
      begin = 0;
      end = count;
    }
  };
  enum class End { kOpen, kEnded, kTold };  // nothing more comes; the other side knows

  void Run() {
    for (;;) {
      want_ = {};
      bool moved = false;
      broken_ = false;
      moved |= FromTls();
      moved |= ToLocal();
      moved |= FromLocal();
      moved |= ToTls();
      if (broken_ || (from_tls_ == End::kTold && from_local_ == End::kTold)) return;
      if (!moved && !Wait()) return;
    }
  }

  bool FromTls() {
    if (from_tls_ != End::kOpen || !in_.empty()) return false;
    ERR_clear_error();
    size_t got = 0;
    const int result = SSL_read_ex(ssl(), in_.bytes.data(), in_.bytes.size(), &got);
    if (result > 0) {
      in_.Fill(got);
      return true;
    }
    if (SSL_get_error(ssl(), result) == SSL_ERROR_ZERO_RETURN) {
      from_tls_ = End::kEnded;
      return true;
    }
    return WantsMore(result);
  }
  bool ToLocal() {
    if (!in_.empty()) {
      const ssize_t put =
          ::send(local_.get(), in_.bytes.data() + in_.begin, in_.end - in_.begin, MSG_NOSIGNAL);
      if (put >= 0) {
        in_.begin += static_cast<size_t>(put);
        return true;
      }
      return LocalWants(POLLOUT);
    }
    if (from_tls_ != End::kEnded) return false;
    ::shutdown(local_.get(), SHUT_WR);
    from_tls_ = End::kTold;
    return true;
  }
  bool FromLocal() {
    if (from_local_ != End::kOpen || !out_.empty()) return false;
    const ssize_t got = ::recv(local_.get(), out_.bytes.data(), out_.bytes.size(), 0);
    if (got < 0) return LocalWants(POLLIN);
    if (got == 0) {
      from_local_ = End::kEnded;
    } else {
      out_.Fill(static_cast<size_t>(got));
    }
    return true;
  }
  bool ToTls() {
    ERR_clear_error();
    if (!out_.empty()) {
      size_t put = 0;
      const int result =
          SSL_write_ex(ssl(), out_.bytes.data() + out_.begin, out_.end - out_.begin, &put);
      if (result <= 0) return WantsMore(result);
      out_.begin += put;
      return true;
    }
    if (from_local_ != End::kEnded) return false;
    const int result = SSL_shutdown(ssl());
    if (result < 0) return WantsMore(result);
    ::shutdown(tls_->socket_.get(), SHUT_WR);
    from_local_ = End::kTold;
    return true;
  }

  bool WantsMore(int result) {
    switch (SSL_get_error(ssl(), result)) {
      case SSL_ERROR_WANT_READ:
        want_.tls |= POLLIN;
        break;
      case SSL_ERROR_WANT_WRITE:
        want_.tls |= POLLOUT;
        break;
      default:
        broken_ = true;
    }
    return false;
  }
  bool LocalWants(short events) {
    if (errno == EINTR) return true;
    if (errno != EAGAIN) broken_ = true;
    want_.local |= events;
    return false;
  }
  // False: it is to end.
  bool Wait() {
    // Of a descriptor that is closed altogether poll() says so whatever it is asked for: it is
    // asked for one that nobody waits for only where that ends the pump, because all that gRPC has
    // sent is gone, and nobody is there any more to hear what comes.
    const bool local = want_.local != 0 || from_local_ == End::kTold;
    std::array<pollfd, 3> polled = {{{want_.tls != 0 ? tls_->socket_.get() : -1, want_.tls, 0},
                                     {local ? local_.get() : -1, want_.local, 0},
                                     {stop_.get(), POLLIN, 0}}};
    if (::poll(polled.data(), polled.size(), -1) < 0) return errno == EINTR;
    const bool deserted = from_local_ == End::kTold && (polled[1].revents & POLLHUP) != 0;
    return polled[2].revents == 0 && !deserted;
  }

  [[nodiscard]] SSL* ssl() const { return tls_->ssl_.get(); }

  const std::unique_ptr<TlsStream> tls_;
  const wire::UniqueFd local_;
  const wire::UniqueFd stop_;  // an eventfd
  std::atomic<bool> done_{false};
  // ---- the thread's own ----
  Buffer in_;   // from the network to gRPC
  Buffer out_;  // from gRPC to the network
  End from_tls_ = End::kOpen;
  End from_local_ = End::kOpen;
  bool broken_ = false;
  struct {
    short tls = 0;
    short local = 0;
  } want_;  // events that a direction waits for
  std::thread thread_;
};

TlsPumps::TlsPumps() = default;
TlsPumps::~TlsPumps() = default;

absl::StatusOr<wire::UniqueFd> TlsPumps::Start(std::unique_ptr<TlsStream> stream) {
  MutexLock lock(mutex_);
  // First, for their descriptors.
  pumps_.remove_if([](const auto& pump) { return pump->done(); });
  std::array<int, 2> ends{};
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends.data()) != 0) {
    return absl::ErrnoToStatus(errno, "socketpair");
  }
  wire::UniqueFd grpcs(ends[0]);
  wire::UniqueFd ours(ends[1]);
  wire::UniqueFd stop(::eventfd(0, EFD_CLOEXEC));
  if (!stop.valid()) return absl::ErrnoToStatus(errno, "eventfd");
  auto pump = std::make_unique<TlsPump>(std::move(stream), std::move(ours), std::move(stop));
  if (absl::Status started = pump->Start(); !started.ok()) return started;
  pumps_.push_back(std::move(pump));
  return grpcs;
}

}  // namespace dmuond::server
