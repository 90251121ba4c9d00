#include "server/daemon/log.h"

#include <array>
#include <atomic>
#include <memory>
#include <optional>
#include <utility>

#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"
#include "spdlog/sinks/stdout_sinks.h"
#include "spdlog/spdlog.h"

namespace dmuond::server::log {
namespace {

// spdlog brings time, sink and locks; the rest of the line is rendered here.
constexpr char kKeyValuePattern[] = "time=%Y-%m-%dT%H:%M:%S.%eZ %v";
constexpr char kJsonPattern[] = R"({"time":"%Y-%m-%dT%H:%M:%S.%eZ",%v})";

constexpr std::array<std::pair<Level, const char*>, 5> kLevels = {{{Level::kTrace, "trace"},
                                                                   {Level::kDebug, "debug"},
                                                                   {Level::kInfo, "info"},
                                                                   {Level::kWarn, "warn"},
                                                                   {Level::kError, "error"}}};

std::atomic<Format> current_format{Format::kKeyValue};

spdlog::level::level_enum ToSpdlog(Level level) {
  switch (level) {
    case Level::kTrace:
      return spdlog::level::trace;
    case Level::kDebug:
      return spdlog::level::debug;
    case Level::kInfo:
      return spdlog::level::info;
    case Level::kWarn:
      return spdlog::level::warn;
    case Level::kError:
      return spdlog::level::err;
  }
  return spdlog::level::info;
}

Level FromSpdlog(spdlog::level::level_enum level) {
  for (const auto& [ours, name] : kLevels) {
    if (ToSpdlog(ours) == level) return ours;
  }
  return Level::kError;
}

// Lives as long as the process: other threads may log while it ends.
spdlog::logger& Logger() {
  static spdlog::logger* logger = [] {
    auto* made = new spdlog::logger("dmuond", std::make_shared<spdlog::sinks::stderr_sink_mt>());
    made->set_pattern(kKeyValuePattern, spdlog::pattern_time_type::utc);
    made->set_level(spdlog::level::info);
    return made;
  }();
  return *logger;
}

// Escapes what would end the line or the quotes; the same escapes serve JSON.
std::string Escape(absl::string_view text) {
  std::string escaped;
  escaped.reserve(text.size());
  for (const char c : text) {
    switch (c) {
      case '"':
        escaped += "\\\"";
        break;
      case '\\':
        escaped += "\\\\";
        break;
      case '\n':
        escaped += "\\n";
        break;
      case '\r':
        escaped += "\\r";
        break;
      case '\t':
        escaped += "\\t";
        break;
      default:
        if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) {
          escaped += absl::StrFormat("\\u%04x", static_cast<unsigned>(c));
        } else {
          escaped += c;
        }
    }
  }
  return escaped;
}

bool IsBare(absl::string_view text) {
  for (const char c : text) {
    const bool plain = c > ' ' && c != '"' && c != '=' && c != '\\' && c != 0x7f;
    if (!plain && static_cast<unsigned char>(c) < 0x80) return false;
  }
  return !text.empty();
}

void Append(Format format, absl::string_view key, absl::string_view value, bool number,
            std::string& line) {
  if (format == Format::kJson) {
    const char* quote = number ? "" : "\"";
    absl::StrAppend(&line, line.empty() ? "" : ",", "\"", Escape(key), "\":", quote, Escape(value),
                    quote);
  } else if (IsBare(value)) {
    absl::StrAppend(&line, line.empty() ? "" : " ", key, "=", value);
  } else {
    absl::StrAppend(&line, line.empty() ? "" : " ", key, "=\"", Escape(value), "\"");
  }
}

// A line of Write(), read again: what stands after the time, in JSON without the last brace.
struct Written {
  Level level;
  absl::string_view text;
};

std::optional<Written> ReadLine(Format format, absl::string_view line) {
  const bool json = format == Format::kJson;
  if (!absl::ConsumePrefix(&line, json ? R"({"time":")" : "time=")) return std::nullopt;
  const absl::string_view separator = json ? "\"," : " ";
  const size_t time_end = line.find(separator);
  if (time_end == absl::string_view::npos) return std::nullopt;
  line.remove_prefix(time_end + separator.size());
  if (json && !absl::ConsumeSuffix(&line, "}")) return std::nullopt;
  absl::string_view after = line;
  if (!absl::ConsumePrefix(&after, json ? R"("level":")" : "level=")) return std::nullopt;
  const absl::StatusOr<Level> level = ParseLevel(after.substr(0, after.find(json ? '"' : ' ')));
  if (!level.ok()) return std::nullopt;
  return Written{*level, line};
}

}  // namespace

std::string Render(Format format, Level level, absl::string_view message, Fields fields) {
  std::string line;
  Append(format, "level", Name(level), false, line);
  Append(format, "msg", message, false, line);
  for (const Field& field : fields) Append(format, field.key, field.value, field.number, line);
  return line;
}

void Write(Level level, absl::string_view message, Fields fields) {
  spdlog::logger& logger = Logger();
  if (!logger.should_log(ToSpdlog(level))) return;
  const std::string line = Render(current_format.load(), level, message, fields);
  logger.log(ToSpdlog(level), spdlog::string_view_t(line.data(), line.size()));
}

void Relay(absl::string_view line, Fields fields) {
  const Format format = current_format.load();
  const std::optional<Written> written = ReadLine(format, line);
  if (!written.has_value()) return Write(Level::kWarn, line, fields);
  std::string text(written->text);
  for (const Field& field : fields) Append(format, field.key, field.value, field.number, text);
  Logger().log(ToSpdlog(written->level), spdlog::string_view_t(text.data(), text.size()));
}

absl::StatusOr<Level> ParseLevel(absl::string_view name) {
  for (const auto& [level, known] : kLevels) {
    if (name == known) return level;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("log level '", name, "' is none of trace, debug, info, warn, error"));
}

const char* Name(Level level) {
  for (const auto& [known, name] : kLevels) {
    if (known == level) return name;
  }
  return "error";
}

absl::StatusOr<Format> ParseFormat(absl::string_view name) {
  if (name == "kv") return Format::kKeyValue;
  if (name == "json") return Format::kJson;
  return absl::InvalidArgumentError(absl::StrCat("log format '", name, "' is none of kv, json"));
}

const char* Name(Format format) { return format == Format::kJson ? "json" : "kv"; }

Level SetLevel(Level level) {
  spdlog::logger& logger = Logger();
  const Level previous = FromSpdlog(logger.level());
  logger.set_level(ToSpdlog(level));
  return previous;
}

Level CurrentLevel() { return FromSpdlog(Logger().level()); }

Format CurrentFormat() { return current_format.load(); }

void SetFormat(Format format) {
  current_format.store(format);
  Logger().set_pattern(format == Format::kJson ? kJsonPattern : kKeyValuePattern,
                       spdlog::pattern_time_type::utc);
}

}  // namespace dmuond::server::log
