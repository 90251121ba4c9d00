#include "server/daemon/calls/session_keys.h"

#include <sys/random.h>

#include "scheduler/limits.h"

namespace dmuond::server {

uint64_t RandomKeyHalf() {
  uint64_t number = 0;
  // Interrupted at most: the kernel has been seeded long before.
  while (::getrandom(&number, sizeof(number), 0) != sizeof(number) || number == 0) continue;
  return number;
}

bool SameSecret(uint64_t one, uint64_t other) {
  // Volatile: no early way out for bytes that differ first.
  volatile uint64_t difference = one ^ other;
  return difference == 0;
}

v1::SessionKey NewSessionKey(int32_t place, uint64_t incarnation) {
  constexpr auto kPlaces = static_cast<uint64_t>(scheduler::kPlacesMax);
  const uint64_t number = RandomKeyHalf();
  v1::SessionKey key;
  key.set_session(number - number % kPlaces + static_cast<uint64_t>(place));
  key.set_incarnation(incarnation);
  key.set_secret(RandomKeyHalf());
  return key;
}

int32_t PlaceOf(const v1::SessionKey& key) {
  return static_cast<int32_t>(key.session() % static_cast<uint64_t>(scheduler::kPlacesMax));
}

}  // namespace dmuond::server
