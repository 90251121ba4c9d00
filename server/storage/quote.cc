#include "server/storage/quote.h"

#include <cstddef>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "nlohmann/json.hpp"

namespace dmuond::server::storage {

bool IsUtf8(const std::string& text) {
  using Json = nlohmann::json;
  const std::string written = Json(text).dump(-1, ' ', false, Json::error_handler_t::replace);
  return Json::parse(written).get_ref<const std::string&>() == text;
}

std::string Quote(const std::string& text) {
  constexpr size_t kShown = 200;
  const std::string shown = text.substr(0, kShown);
  return absl::StrCat("\"", IsUtf8(shown) ? absl::Utf8SafeCEscape(shown) : absl::CHexEscape(shown),
                      text.size() > kShown ? "…\"" : "\"");
}

}  // namespace dmuond::server::storage
