// Compiled for AVX2: nothing in here may be called where the processor lacks it.
#if defined(__x86_64__)
#include "server/storage/xxh3_state.h"

namespace dmuond::server::storage {

void UpdateWithAvx2(XXH3_state_t& state, const void* data, size_t bytes) {
  XXH3_64bits_update(&state, data, bytes);
}

}  // namespace dmuond::server::storage
#endif
