// Text of unknown origin in a message.
#ifndef DMUOND_SERVER_STORAGE_QUOTE_H_
#define DMUOND_SERVER_STORAGE_QUOTE_H_

#include <string>

namespace dmuond::server::storage {

[[nodiscard]] bool IsUtf8(const std::string& text);

// In double quotes, control characters escaped, cut where it is long. What comes out is UTF-8, as
// messages on a wire must be.
[[nodiscard]] std::string Quote(const std::string& text);

}  // namespace dmuond::server::storage

#endif  // DMUOND_SERVER_STORAGE_QUOTE_H_
