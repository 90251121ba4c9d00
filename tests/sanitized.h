// Whether a sanitizer is compiled in: g++ defines a macro, clang has a feature.
#ifndef DMUOND_TESTS_SANITIZED_H_
#define DMUOND_TESTS_SANITIZED_H_

namespace dmuond::testing {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kSanitized = true;
#elif defined(__has_feature)
inline constexpr bool kSanitized =
    __has_feature(address_sanitizer) || __has_feature(thread_sanitizer);
#else
inline constexpr bool kSanitized = false;
#endif

// Random and seeded runs are so many fewer under a sanitizer as each of them takes longer.
inline constexpr int kSlowdown = kSanitized ? 10 : 1;

}  // namespace dmuond::testing

#endif  // DMUOND_TESTS_SANITIZED_H_
