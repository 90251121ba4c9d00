// What the C library's functions return that decide a lane's bits. An update of the library gives
// it another build-id, and changes these results seldom: so results are compared, and not builds.
//
//   bits.set_functions(FunctionsDigest());   →  "pow, log2 4c1f09…"
//
// The lane also calls sqrt, ldexp, lround and llround, whose results the standards fix to the bit.
//
// Threads: any.
#ifndef DMUOND_SERVER_LANE_FUNCTIONS_H_
#define DMUOND_SERVER_LANE_FUNCTIONS_H_

#include <string>

namespace dmuond::server::lane {

// Powers: of AdamW's betas by steps, of norms and of scales. Logarithms: of numbers of elements,
// and of bounds. The digest is of some thousands of results of each, which takes less than a
// millisecond, and is the same in every process where all of them are.
[[nodiscard]] std::string FunctionsDigest();

// The same of other functions, for tests.
[[nodiscard]] std::string FunctionsDigest(double (*pow)(double, double), double (*log2)(double));

}  // namespace dmuond::server::lane

#endif  // DMUOND_SERVER_LANE_FUNCTIONS_H_
