#include "server/storage/checksum.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>

namespace dmuond::server::storage {
namespace {

std::span<const std::byte> Bytes(const std::string& text) {
  return std::as_bytes(std::span<const char>(text));
}

TEST(ChecksumTest, IsXxh3With64Bits) {
  // Of the reference implementation's own test vectors.
  EXPECT_EQ(ChecksumOf(std::string()), "2d06800538d394c2");
  Checksum checksum;
  EXPECT_EQ(checksum.Hex(), "2d06800538d394c2");
}

TEST(ChecksumTest, PartsMakeTheSameAsTheWhole) {
  std::string text(1'000'003, '\0');
  for (size_t i = 0; i < text.size(); ++i) text[i] = static_cast<char>(i * i >> 7);
  const std::string whole = ChecksumOf(text);
  Checksum checksum;
  for (const size_t part : {1UL, 63UL, 4096UL, 262'144UL, text.size()}) {
    for (size_t at = 0; at < text.size(); at += part) {
      checksum.Add(Bytes(text).subspan(at, std::min(part, text.size() - at)));
    }
    EXPECT_EQ(checksum.Hex(), whole) << part;
    checksum.Reset();
  }
  text[500'000] ^= 1;
  EXPECT_NE(ChecksumOf(text), whole);
}

TEST(ChecksumTest, SixteenLowerCaseDigits) {
  EXPECT_TRUE(IsChecksum("2d06800538d394c2"));
  for (const char* text :
       {"", "2d06800538d394c", "2d06800538d394c2f", "2D06800538d394c2", "2d06800538d394cg"}) {
    EXPECT_FALSE(IsChecksum(text)) << text;
  }
}

}  // namespace
}  // namespace dmuond::server::storage
