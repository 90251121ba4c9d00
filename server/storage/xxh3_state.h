// xxHash's state, for all sets of instructions.
#ifndef DMUOND_SERVER_STORAGE_XXH3_STATE_H_
#define DMUOND_SERVER_STORAGE_XXH3_STATE_H_

#include <cstddef>

// Includers get all of xxHash inlined, so programs need no library at run time.
#define XXH_INLINE_ALL
#include <xxhash.h>

namespace dmuond::server::storage {

#if defined(__x86_64__)
// Twice as fast as with the instructions that every x86-64 has. REQUIRES: the processor has AVX2.
void UpdateWithAvx2(XXH3_state_t& state, const void* data, size_t bytes);
#endif

}  // namespace dmuond::server::storage

#endif  // DMUOND_SERVER_STORAGE_XXH3_STATE_H_
