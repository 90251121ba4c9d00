// XXH3 of 64 bits. It finds flipped bits and torn files at the speed of memory; it does not protect
// from attackers.
#ifndef DMUOND_SERVER_STORAGE_CHECKSUM_H_
#define DMUOND_SERVER_STORAGE_CHECKSUM_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

namespace dmuond::server::storage {

inline constexpr size_t kChecksumDigits = 16;

// Of bytes that come in parts.
class Checksum {
 public:
  Checksum();
  ~Checksum();
  Checksum(const Checksum&) = delete;
  Checksum& operator=(const Checksum&) = delete;

  void Reset();
  void Add(std::span<const std::byte> data);
  [[nodiscard]] std::string Hex() const;  // 16 digits, lower case

 private:
  struct State;
  std::unique_ptr<State> state_;
};

[[nodiscard]] uint64_t Checksum64Of(std::span<const std::byte> data);
[[nodiscard]] std::string ChecksumOf(std::span<const std::byte> data);
[[nodiscard]] std::string ChecksumOf(const std::string& text);

// Whether the text can be a checksum.
[[nodiscard]] bool IsChecksum(const std::string& text);

}  // namespace dmuond::server::storage

#endif  // DMUOND_SERVER_STORAGE_CHECKSUM_H_
