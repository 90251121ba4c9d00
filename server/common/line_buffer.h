// Cuts a stream of bytes into lines. Threads: one at a time.
#ifndef DMUOND_SERVER_COMMON_LINE_BUFFER_H_
#define DMUOND_SERVER_COMMON_LINE_BUFFER_H_

#include <string>
#include <utility>

#include "absl/functional/function_ref.h"
#include "absl/strings/string_view.h"

namespace dmuond::server {

class LineBuffer {
 public:
  using OnLine = absl::FunctionRef<void(const std::string& line)>;

  // Calls back for each complete line, without its end. Empty lines are left out, longer ones than
  // kLineBytesMax are cut in two.
  void Append(absl::string_view bytes, OnLine on_line) {
    for (const char c : bytes) {
      if (c != '\n') line_ += c;
      if (c == '\n' || line_.size() >= kLineBytesMax) Flush(on_line);
    }
  }
  // What came after the last end of line.
  void Flush(OnLine on_line) {
    if (!line_.empty() && line_.back() == '\r') line_.pop_back();
    if (!line_.empty()) on_line(std::exchange(line_, {}));
  }

 private:
  static constexpr size_t kLineBytesMax = 8192;
  std::string line_;
};

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_COMMON_LINE_BUFFER_H_
