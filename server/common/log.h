// The log of every program: one line for each event on stderr, as key=value (or JSON), quoted where
// needed. Text that others have written is escaped, and cut where it is long (scheduler/shown.h).
// Logging never waits for the reader of stderr (server/common/line_writer.h).
//
//   log::Info("step committed", {{"job", name}, {"epoch", epoch}, {"step", step}});
//   time=2031-01-02T03:04:05.678Z level=info msg="step committed" job=demo epoch=1 step=7
//
// Threads: any.
#ifndef DMUOND_SERVER_COMMON_LOG_H_
#define DMUOND_SERVER_COMMON_LOG_H_

#include <cmath>
#include <concepts>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace dmuond::server::log {

enum class Level : uint8_t { kTrace, kDebug, kInfo, kWarn, kError };
enum class Format : uint8_t { kKeyValue, kJson };

// One key and its value. Values: strings, numbers, bools, statuses, and the strong integers of
// scheduler/types.h.
struct Field {
  Field(absl::string_view key, absl::string_view value) : key(key), value(value) {}
  Field(absl::string_view key, const std::string& value) : key(key), value(value) {}
  Field(absl::string_view key, const char* value) : key(key), value(value) {}
  Field(absl::string_view key, bool value)
      : key(key), value(value ? "true" : "false"), number(true) {}
  // Without the status's payloads, which are for programs: the message says the same.
  Field(absl::string_view key, const absl::Status& value)
      : key(key), value(value.ToString(absl::StatusToStringMode::kWithNoExtraData)) {}
  template <typename Number>
  requires std::integral<Number> || std::floating_point<Number> Field(absl::string_view key,
                                                                      Number value)
      : key(key), value(absl::StrCat(value)), number(std::isfinite(static_cast<double>(value))) {}
  template <typename StrongInteger>
  requires requires(StrongInteger x) {
    { x.value() } -> std::integral;
  }
  Field(absl::string_view key, StrongInteger value)
      : key(key), value(absl::StrCat(value.value())), number(true) {}

  absl::string_view key;
  std::string value;
  bool number = false;  // JSON needs no quotes
};
using Fields = absl::Span<const Field>;

void Write(Level level, absl::string_view message, Fields fields = {});
inline void Trace(absl::string_view message, Fields fields = {}) {
  Write(Level::kTrace, message, fields);
}
inline void Debug(absl::string_view message, Fields fields = {}) {
  Write(Level::kDebug, message, fields);
}
inline void Info(absl::string_view message, Fields fields = {}) {
  Write(Level::kInfo, message, fields);
}
inline void Warn(absl::string_view message, Fields fields = {}) {
  Write(Level::kWarn, message, fields);
}
inline void Error(absl::string_view message, Fields fields = {}) {
  Write(Level::kError, message, fields);
}

// Writes a line that came from another process of ours. A line of this log's format keeps its level
// and gets a new time and `fields`; any other line becomes a warning with `fields`.
void Relay(absl::string_view line, Fields fields);

// "trace", "debug", "info", "warn", "error". INVALID_ARGUMENT names the text and the choices.
[[nodiscard]] absl::StatusOr<Level> ParseLevel(absl::string_view name);
[[nodiscard]] const char* Name(Level level);
// "kv", "json".
[[nodiscard]] absl::StatusOr<Format> ParseFormat(absl::string_view name);
[[nodiscard]] const char* Name(Format format);

// Drops lines below `level` from now on. Returns the level before; at the start it is kInfo.
Level SetLevel(Level level);
[[nodiscard]] Level CurrentLevel();
void SetFormat(Format format);  // at the start: kKeyValue
[[nodiscard]] Format CurrentFormat();

// Writes text as it is, line ends included.
void WriteText(std::string text);

// Waits until what was logged so far is written, for a second at most. May be called in a signal
// handler. A return from main() flushes by itself.
void Flush();
// Flush(), then ::_exit().
[[noreturn]] void EndProcess(int exit_code);
// From now on the log is flushed when abort() or a wild pointer ends the process. Call it once, at
// the start.
void FlushAtFatalSignals();

// The part of a line after its time, for tests and for programs that print it elsewhere.
[[nodiscard]] std::string Render(Format format, Level level, absl::string_view message,
                                 Fields fields);

}  // namespace dmuond::server::log

#endif  // DMUOND_SERVER_COMMON_LOG_H_
