#include <unistd.h>

#include <chrono>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "base/status_macros.h"
#include "client/cpp/src/launch.h"
#include "client/cpp/src/variable.h"
#include "dmuond/client/options.h"
#include "dmuond/wire/socket_path.h"

namespace dmuond::client {
namespace {

absl::Status ReadInteger(const char* name, int32_t& value) {
  const std::string text = Variable(name);
  if (text.empty() || absl::SimpleAtoi(text, &value)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(name, "='", text, "' is not an integer"));
}

absl::Status ReadUid(const char* name, std::optional<uid_t>& value) {
  const std::string text = Variable(name);
  uint32_t uid = 0;
  if (text.empty()) return absl::OkStatus();
  if (!absl::SimpleAtoi(text, &uid)) {
    return absl::InvalidArgumentError(absl::StrCat(name, "='", text, "' is not a user's number"));
  }
  value = uid;
  return absl::OkStatus();
}

absl::Status ReadSeconds(const char* name, std::chrono::milliseconds& value) {
  const std::string text = Variable(name);
  double seconds = 0;
  if (text.empty()) return absl::OkStatus();
  if (!absl::SimpleAtod(text, &seconds) || !(seconds >= 0) || seconds > 1e9) {
    return absl::InvalidArgumentError(
        absl::StrCat(name, "='", text, "' is not a number of at least 0"));
  }
  value = std::chrono::milliseconds(std::llround(seconds * 1000));
  return absl::OkStatus();
}

absl::Status ReadResume(Resume& resume) {
  const std::string text = Variable("DMUOND_RESUME");
  int32_t restarts = 0;
  absl::Status status = ReadInteger("TORCHELASTIC_RESTART_COUNT", restarts);
  if (!status.ok() || text.empty() || text == "0" || text == "never") return status;
  if (text == "1" || text == "if_present") {
    resume = Resume::kIfPresent;
  } else if (text == "require") {
    resume = Resume::kRequire;
  } else if (text == "discard") {
    resume = restarts > 0 ? Resume::kIfPresent : Resume::kDiscard;
  } else {
    return absl::InvalidArgumentError(absl::StrCat(
        "DMUOND_RESUME='", text, "' is none of 1, never, if_present, require, discard"));
  }
  return absl::OkStatus();
}

absl::Status ReadToken(std::string& token) {
  const std::string path = Variable("DMUOND_TOKEN_FILE");
  if (path.empty()) return absl::OkStatus();
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    return absl::InvalidArgumentError(
        absl::StrCat("DMUOND_TOKEN_FILE='", path, "' cannot be read"));
  }
  token.assign(std::istreambuf_iterator<char>(file), {});
  absl::StripAsciiWhitespace(&token);
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::string> SocketPath(const std::string& address) {
  std::string chosen = address.empty() ? Variable("DMUOND_ADDRESS") : address;
  if (chosen.empty()) {
    const std::string base = Variable("XDG_RUNTIME_DIR");
    chosen = absl::StrCat(base.empty() ? "/tmp" : base, "/dmuond-", ::getuid(), "/dmuond.sock");
  }
  std::string path(absl::StripPrefix(chosen, "unix:"));
  if (path.rfind("//", 0) == 0) path.erase(0, 2);
  if (path.empty() || path[0] != '/') {
    return absl::InvalidArgumentError(absl::StrCat(
        "address '", chosen, "' is not the path of a Unix socket (unix:/path/to/dmuond.sock)"));
  }
  RETURN_IF_ERROR(wire::CheckSocketPath(path + wire::kAttachSuffix));
  return path;
}

absl::StatusOr<Options> OptionsFromEnvironment() {
  Options options;
  options.address = Variable("DMUOND_ADDRESS");
  if (const std::string job = Variable("DMUOND_JOB"); !job.empty()) options.job = job;
  absl::Status status = ReadInteger("RANK", options.rank);
  if (status.ok()) status = ReadInteger("WORLD_SIZE", options.world_size);
  if (status.ok()) status = ReadInteger("LOCAL_RANK", options.home_lane);
  if (status.ok()) status = ReadResume(options.resume);
  if (status.ok()) status = ReadToken(options.token);
  if (status.ok()) status = ReadSeconds("DMUOND_RECONNECT_S", options.reconnect_timeout);
  if (status.ok()) status = ReadUid("DMUOND_SERVER_UID", options.server_uid);
  if (!status.ok()) return status;
  options.launch = LaunchFromEnvironment();
  options.poison = Variable("DMUOND_POISON") == "1";
  return options;
}

}  // namespace dmuond::client
