#include "server/daemon/calls/session_keys.h"

#include <sys/random.h>

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

v1::SessionKey NewSessionKey(uint64_t incarnation) {
  v1::SessionKey key;
  key.set_session(RandomKeyHalf());
  key.set_incarnation(incarnation);
  key.set_secret(RandomKeyHalf());
  return key;
}

}  // namespace dmuond::server
