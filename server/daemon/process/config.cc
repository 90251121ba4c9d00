#include "server/daemon/process/config.h"

#include <array>
#include <cstdlib>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "google/protobuf/io/tokenizer.h"
#include "google/protobuf/text_format.h"
#include "server/common/whole_file.h"
#include "server/daemon/process/config_flags.h"

namespace dmuond::server {
namespace {

constexpr std::array<std::pair<const char*, const char*>, 4> kEnvironment = {
    {{"DMUOND_SOCKET", "socket"},
     {"DMUOND_NODES", "nodes"},
     {"DMUOND_NODE_RANK", "node_rank"},
     {"DMUOND_COORDINATOR", "coordinator"}}};

// The first error of a text, with its place.
class FirstError : public google::protobuf::io::ErrorCollector {
 public:
  explicit FirstError(std::string name) : name_(std::move(name)) {}
  void AddError(int line, google::protobuf::io::ColumnNumber column,
                const std::string& message) override {
    if (error_.empty()) error_ = absl::StrCat(name_, ":", line + 1, ":", column + 1, ": ", message);
  }
  [[nodiscard]] const std::string& error() const { return error_; }

 private:
  std::string name_;
  std::string error_;
};

absl::StatusOr<config::ConfigFile> ReadConfigFile(const std::string& path) {
  const absl::StatusOr<std::string> text = WholeFile(path);
  if (!text.ok()) {
    return absl::InvalidArgumentError(
        absl::StrCat("--config=", path, " ", text.status().message()));
  }
  return ParseConfigText(*text, path);
}

absl::Status OverrideByEnvironment(config::ConfigFile& values) {
  for (const auto& [variable, name] : kEnvironment) {
    const char* text = std::getenv(variable);
    if (text == nullptr || *text == '\0') continue;
    const absl::Status status =
        SetField(*config::ConfigFile::descriptor()->FindFieldByName(name), text, values);
    if (!status.ok()) {
      return absl::InvalidArgumentError(
          absl::StrCat("environment variable ", variable, ": ", status.message()));
    }
  }
  return absl::OkStatus();
}

}  // namespace

void Override(const config::ConfigFile& from, config::ConfigFile& to) {
  if (from.allowed_uids_size() > 0) to.clear_allowed_uids();  // merging would append
  if (from.admin_uids_size() > 0) to.clear_admin_uids();
  to.MergeFrom(from);
}

absl::StatusOr<config::ConfigFile> ParseConfigText(const std::string& text,
                                                   const std::string& name) {
  FirstError errors(name);
  google::protobuf::TextFormat::Parser parser;
  parser.RecordErrorsTo(&errors);
  config::ConfigFile file;
  if (!parser.ParseFromString(text, &file)) return absl::InvalidArgumentError(errors.error());
  return file;
}

absl::StatusOr<Config> LoadConfig(int argc, char** argv) {
  absl::StatusOr<ParsedFlags> flags = ParseFlags(argc, argv);
  if (!flags.ok()) return flags.status();
  if (!flags->help.empty() || flags->version) {
    Config config;
    config.help = flags->help;
    config.version = flags->version;
    return config;
  }
  std::vector<std::string> mistakes = std::move(flags->mistakes);
  config::ConfigFile values = flags->defaults;
  if (!flags->config_path.empty()) {
    absl::StatusOr<config::ConfigFile> file = ReadConfigFile(flags->config_path);
    if (file.ok()) Override(*file, values);
    if (!file.ok()) mistakes.emplace_back(file.status().message());
  }
  if (absl::Status status = OverrideByEnvironment(values); !status.ok()) {
    mistakes.emplace_back(status.message());
  }
  Override(flags->given, values);
  // What could not be read stands at its default, which is no further mistake.
  absl::StatusOr<Config> config = Check(values);
  if (!config.ok()) mistakes.emplace_back(config.status().message());
  if (!mistakes.empty()) return absl::InvalidArgumentError(absl::StrJoin(mistakes, "\n"));
  config->print_config = flags->print_config;
  config->check_config = flags->check_config;
  return config;
}

std::string ToText(const Config& config) {
  std::string text;
  google::protobuf::TextFormat::PrintToString(config.values, &text);
  return text;
}

}  // namespace dmuond::server
