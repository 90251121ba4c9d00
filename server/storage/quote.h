// Text of unknown origin in a message.
#ifndef DMUOND_SERVER_STORAGE_QUOTE_H_
#define DMUOND_SERVER_STORAGE_QUOTE_H_

#include <string>

namespace dmuond::server::storage {

[[nodiscard]] bool IsUtf8(const std::string& text);

// The text in double quotes, with control characters escaped, and cut where it is long. The result
// is UTF-8, as messages on a wire must be.
[[nodiscard]] std::string Quote(const std::string& text);

}  // namespace dmuond::server::storage

#endif  // DMUOND_SERVER_STORAGE_QUOTE_H_
