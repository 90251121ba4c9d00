// Makes text that somebody else has written safe to show to people, in a message, the log or a
// table: it cannot end the line, command a terminal, reverse the direction of text or flood the
// reader. The result is UTF-8, whatever came in.
//
// Threads: any.
#ifndef DMUOND_SCHEDULER_SHOWN_H_
#define DMUOND_SCHEDULER_SHOWN_H_

#include <cstddef>
#include <string>

#include "absl/strings/string_view.h"

namespace dmuond::scheduler {

// A parameter's name is shown whole (kNameBytesMax).
inline constexpr size_t kShownBytesMax = 1024;

// Control characters, those that end lines or turn the direction of text, and bytes that are no
// UTF-8 (as \ufffd) are written as \n, \r, \t or \uXXXX. What is longer than about `bytes_max` is
// cut between two characters, and its length is said.
[[nodiscard]] std::string Shown(absl::string_view text, size_t bytes_max = kShownBytesMax);

// The same between quotes, which the caller writes: quotes and backslashes are escaped too, as JSON
// wants it.
[[nodiscard]] std::string ShownInQuotes(absl::string_view text, size_t bytes_max = kShownBytesMax);

[[nodiscard]] bool IsUtf8(absl::string_view text);

// Whether Shown() would only shorten it.
[[nodiscard]] bool IsPlain(absl::string_view text);

}  // namespace dmuond::scheduler

#endif  // DMUOND_SCHEDULER_SHOWN_H_
