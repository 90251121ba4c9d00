#include "server/common/log.h"

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include "absl/strings/strip.h"
#include "base/unique_fd.h"
#include "scheduler/shown.h"
#include "server/common/line_writer.h"
#include "server/common/log_file.h"
#include "server/common/recent_lines.h"
#include "spdlog/pattern_formatter.h"
#include "spdlog/sinks/base_sink.h"
#include "spdlog/spdlog.h"

namespace dmuond::server::log {
namespace {

using scheduler::ShownInQuotes;

// spdlog brings time, sink and locks; the rest of the line is rendered here.
constexpr char kKeyValuePattern[] = "time=%Y-%m-%dT%H:%M:%S.%eZ %v";
constexpr char kJsonPattern[] = R"({"time":"%Y-%m-%dT%H:%M:%S.%eZ",%v})";

constexpr std::array<std::pair<Level, const char*>, 5> kLevels = {{{Level::kTrace, "trace"},
                                                                   {Level::kDebug, "debug"},
                                                                   {Level::kInfo, "info"},
                                                                   {Level::kWarn, "warn"},
                                                                   {Level::kError, "error"}}};

// Of one value, the message too: those who read a log for a value want its beginning.
constexpr size_t kValueBytesMax = 4096;
// For who does not read stderr for a while: some thousands of lines.
constexpr size_t kWaitingBytesMax = size_t{1} << 20;
// Of what still waits when the process ends.
constexpr std::chrono::milliseconds kFlushWithin{1000};

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

constexpr const char* PatternOf(Format format) {
  return format == Format::kJson ? kJsonPattern : kKeyValuePattern;
}

std::string LinesLost(int64_t lines) {
  const Format format = current_format.load();
  const std::string text = Render(
      format, Level::kWarn, "lines are lost: the log could not be written", {{"lines", lines}});
  spdlog::pattern_formatter formatter(PatternOf(format), spdlog::pattern_time_type::utc);
  spdlog::memory_buf_t line;
  formatter.format(spdlog::details::log_msg("dmuond", spdlog::level::warn, text), line);
  return {line.data(), line.size()};
}

// Lives as long as the process: other threads may log while it ends.
LineWriter& Writer() {
  static LineWriter* writer = [] {
    // At a return from main().
    std::atexit([] { Flush(); });
    return new LineWriter(STDERR_FILENO, kWaitingBytesMax, LinesLost);
  }();
  return *writer;
}

class WriterSink final : public spdlog::sinks::base_sink<std::mutex> {
 protected:
  void sink_it_(const spdlog::details::log_msg& message) override {
    spdlog::memory_buf_t line;
    formatter_->format(message, line);
    std::string text(line.data(), line.size());
    if (message.level >= spdlog::level::info) {
      recent_.emplace_back(absl::StripSuffix(text, "\n"));
      if (recent_.size() > kRecentLines) recent_.pop_front();
    }
    Writer().Write(std::move(text));
  }
  void flush_() override {}

 public:
  std::vector<std::string> Recent() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return {recent_.begin(), recent_.end()};
  }

 private:
  static constexpr size_t kRecentLines = 64;
  std::deque<std::string> recent_;
};

const std::shared_ptr<WriterSink>& Sink() {
  static const auto* sink = new std::shared_ptr<WriterSink>(std::make_shared<WriterSink>());
  return *sink;
}

// Lives as long as the process, too.
spdlog::logger& Logger() {
  static spdlog::logger* logger = [] {
    auto* made = new spdlog::logger("dmuond", Sink());
    made->set_pattern(kKeyValuePattern, spdlog::pattern_time_type::utc);
    made->set_level(spdlog::level::info);
    return made;
  }();
  return *logger;
}

void FlushAtDeath(int signal) {
  Flush();
  ::raise(signal);  // its default action: it was reset when this handler was called
}

bool IsBare(absl::string_view text) {
  for (const char c : text) {
    if (c == ' ' || c == '"' || c == '=' || c == '\\') return false;
  }
  return !text.empty() && text.size() <= kValueBytesMax && scheduler::IsPlain(text);
}

void Append(Format format, absl::string_view key, absl::string_view value, bool number,
            std::string& line) {
  if (format == Format::kJson) {
    const char* quote = number ? "" : "\"";
    absl::StrAppend(&line, line.empty() ? "" : ",", "\"", ShownInQuotes(key), "\":", quote,
                    ShownInQuotes(value, kValueBytesMax), quote);
  } else if (IsBare(value)) {
    absl::StrAppend(&line, line.empty() ? "" : " ", key, "=", value);
  } else {
    absl::StrAppend(&line, line.empty() ? "" : " ", key, "=\"",
                    ShownInQuotes(value, kValueBytesMax), "\"");
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
  if (!scheduler::IsPlain(line)) return std::nullopt;
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

std::vector<std::string> RecentLines() { return Sink()->Recent(); }

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
  Logger().set_pattern(PatternOf(format), spdlog::pattern_time_type::utc);
}

absl::Status WriteTo(const std::string& path) {
  wire::UniqueFd file(
      ::open(path.c_str(), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC | O_NOCTTY, 0640));
  if (!file.valid()) return absl::ErrnoToStatus(errno, absl::StrCat("log file ", path));
  Writer().Redirect(std::move(file));
  return absl::OkStatus();
}

void WriteText(std::string text) { Writer().Write(std::move(text)); }

void Flush() { Writer().Flush(kFlushWithin); }

void EndProcess(int exit_code) {
  Flush();
  ::_exit(exit_code);
}

void FlushAtFatalSignals() {
  Writer();  // a handler must not make it
  for (const int signal : {SIGABRT, SIGSEGV, SIGBUS, SIGFPE, SIGILL}) {
    struct sigaction action {};
    // Sanitizers have handlers of their own.
    if (::sigaction(signal, nullptr, &action) != 0 || action.sa_handler != SIG_DFL) continue;
    action.sa_handler = FlushAtDeath;
    action.sa_flags = static_cast<int>(SA_RESETHAND | SA_NODEFER);
    ::sigaction(signal, &action, nullptr);
  }
}

}  // namespace dmuond::server::log
