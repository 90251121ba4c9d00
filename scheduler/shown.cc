#include "scheduler/shown.h"

#include <array>
#include <cstdint>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace dmuond::scheduler {
namespace {

struct Character {
  uint32_t code = 0;
  size_t bytes = 0;  // 0: what stands there is no UTF-8
};

// The first character. REQUIRES: !text.empty().
Character First(absl::string_view text) {
  const auto byte = [text](size_t i) { return static_cast<unsigned char>(text[i]); };
  const uint32_t lead = byte(0);
  if (lead < 0x80) return {lead, 1};
  const size_t bytes = lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : 2;
  if (lead < 0xc2 || lead > 0xf4 || text.size() < bytes) return {};
  uint32_t code = lead & (0x7fU >> bytes);
  for (size_t i = 1; i < bytes; ++i) {
    if ((byte(i) & 0xc0) != 0x80) return {};
    code = code << 6 | (byte(i) & 0x3fU);
  }
  constexpr std::array<uint32_t, 5> kSmallest = {0, 0, 0x80, 0x800, 0x10000};
  const bool surrogate = code >= 0xd800 && code <= 0xdfff;
  if (code < kSmallest[bytes] || code > 0x10ffff || surrogate) return {};
  return {code, bytes};
}

bool IsHarmless(uint32_t code) {
  if (code < 0x20 || (code >= 0x7f && code <= 0x9f)) return false;  // commands, C1 ones too
  if (code == 0x200e || code == 0x200f) return false;               // direction marks
  if (code >= 0x2028 && code <= 0x202e) return false;               // ends of lines, directions
  if (code >= 0x2066 && code <= 0x2069) return false;               // directions
  return code != 0xfeff;
}

std::string Escaped(uint32_t code) {
  switch (code) {
    case '\n':
      return "\\n";
    case '\r':
      return "\\r";
    case '\t':
      return "\\t";
    default:
      return absl::StrFormat("\\u%04x", code);
  }
}

std::string Show(absl::string_view text, size_t bytes_max, bool in_quotes) {
  constexpr uint32_t kReplacement = 0xfffd;
  std::string shown;
  absl::string_view rest = text;
  while (!rest.empty()) {
    if (shown.size() >= bytes_max) {
      absl::StrAppend(&shown, "... (", text.size(), " bytes)");
      break;
    }
    const Character c = First(rest);
    const size_t bytes = c.bytes == 0 ? 1 : c.bytes;
    if (c.bytes == 0) {
      shown += Escaped(kReplacement);
    } else if (!IsHarmless(c.code)) {
      shown += Escaped(c.code);
    } else {
      if (in_quotes && (c.code == '"' || c.code == '\\')) shown += '\\';
      shown.append(rest.data(), bytes);
    }
    rest.remove_prefix(bytes);
  }
  return shown;
}

}  // namespace

std::string Shown(absl::string_view text, size_t bytes_max) {
  return Show(text, bytes_max, /*in_quotes=*/false);
}

std::string ShownInQuotes(absl::string_view text, size_t bytes_max) {
  return Show(text, bytes_max, /*in_quotes=*/true);
}

bool IsUtf8(absl::string_view text) {
  while (!text.empty()) {
    const size_t bytes = First(text).bytes;
    if (bytes == 0) return false;
    text.remove_prefix(bytes);
  }
  return true;
}

bool IsPlain(absl::string_view text) {
  while (!text.empty()) {
    const Character c = First(text);
    if (c.bytes == 0 || !IsHarmless(c.code)) return false;
    text.remove_prefix(c.bytes);
  }
  return true;
}

}  // namespace dmuond::scheduler
