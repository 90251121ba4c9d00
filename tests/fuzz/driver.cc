// Runs a libFuzzer target where there is no libFuzzer: every file of a corpus, then mutations of
// them. An input is a function of corpus, seed and its number alone, so a crash is replayed by the
// two numbers that it prints.
//
//   state_file_fuzz CORPUS ITERATIONS [SEED [ONLY_ITERATION]]
//
// An input that takes more than kInputSecondsMax of the processor, that waits for longer than
// kWaitSecondsMax, or that brings the process beyond kResidentKibMax, fails.
// tools/cmake/Dmuond.cmake gives libFuzzer such budgets, too.
#include <sys/resource.h>
#include <sys/time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace {

using Input = std::string;

constexpr size_t kInputBytesMax = size_t{1} << 20;
constexpr time_t kInputSecondsMax = 60;
// Targets with a daemon wait for up to 30 s until one has left, and longer on a busy machine.
constexpr unsigned kWaitSecondsMax = 300;
constexpr int64_t kResidentKibMax = int64_t{2} << 20;

volatile uint64_t g_seed = 0;
volatile int64_t g_iteration = -1;  // -1: the corpus as it is

void SayWhere(int signal) {
  std::array<char, 128> text{};
  const int length = std::snprintf(text.data(), text.size(), "fuzz: seed %llu, iteration %lld\n",
                                   static_cast<unsigned long long>(g_seed),  // NOLINT
                                   static_cast<long long>(g_iteration));     // NOLINT
  if (write(STDERR_FILENO, text.data(), length) < 0) _exit(1);
  std::signal(signal, SIG_DFL);
  std::raise(signal);
}

std::vector<Input> ReadCorpus(const std::string& directory) {
  std::vector<std::filesystem::path> paths;
  for (const auto& entry : std::filesystem::directory_iterator(directory)) {
    paths.push_back(entry.path());
  }
  std::sort(paths.begin(), paths.end());
  std::vector<Input> corpus;
  for (const auto& path : paths) {
    std::ifstream file(path, std::ios::binary);
    corpus.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  }
  return corpus;
}

class Mutator {
 public:
  Mutator(const std::vector<Input>& corpus, uint64_t seed) : corpus_(corpus), random_(seed) {}

  Input Make() {
    Input input = corpus_[Below(corpus_.size())];
    for (uint64_t left = 1 + Below(1 + Below(8)); left > 0; --left) Mutate(input);
    if (input.size() > kInputBytesMax) input.resize(kInputBytesMax);
    return input;
  }

 private:
  uint64_t Below(uint64_t end) { return end == 0 ? 0 : random_() % end; }

  void Mutate(Input& input) {
    const size_t at = Below(input.size() + 1);
    const size_t length = std::min<size_t>(input.size() - at, 1 + Below(16));
    switch (Below(8)) {
      case 0:
        if (at < input.size()) input[at] = static_cast<char>(input[at] ^ (1 << Below(8)));
        break;
      case 1:
        if (at < input.size()) input[at] = static_cast<char>(Below(256));
        break;
      case 2:
        input.erase(at, length);
        break;
      case 3:
        input.insert(at, input.substr(Below(input.size() + 1), 1 + Below(64)));
        break;
      case 4:
        input.insert(at, kTokens[Below(kTokens.size())]);
        break;
      case 5:
        input.replace(at, length, kTokens[Below(kTokens.size())]);
        break;
      case 6:
        input.resize(at);
        break;
      default: {
        const Input& other = corpus_[Below(corpus_.size())];
        const size_t from = Below(other.size() + 1);
        input.replace(at, length, other.substr(from, 1 + Below(256)));
      }
    }
  }

  // Numbers at the edges, and what JSON and names are made of.
  static constexpr std::array<const char*, 20> kTokens = {"0",
                                                          "-1",
                                                          "2147483648",
                                                          "9223372036854775807",
                                                          "18446744073709551615",
                                                          "1e308",
                                                          "0.5",
                                                          "{",
                                                          "}",
                                                          "[",
                                                          "]",
                                                          "\"",
                                                          ":",
                                                          ",",
                                                          "null",
                                                          "/",
                                                          "..",
                                                          "\\u0000",
                                                          "[0:1]",
                                                          "\xff\xff\xff\xff"};

  const std::vector<Input>& corpus_;
  std::mt19937_64 random_;
};

void Run(const Input& input) {
  const itimerval most{.it_interval = {}, .it_value = {.tv_sec = kInputSecondsMax, .tv_usec = 0}};
  const itimerval none{};
  setitimer(ITIMER_PROF, &most, nullptr);
  alarm(kWaitSecondsMax);
  LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(input.data()), input.size());
  alarm(0);
  setitimer(ITIMER_PROF, &none, nullptr);
  rusage usage{};
  if (getrusage(RUSAGE_SELF, &usage) == 0 && usage.ru_maxrss > kResidentKibMax) {
    std::fprintf(stderr, "fuzz: %ld KiB of memory, beyond %lld\n", usage.ru_maxrss,
                 static_cast<long long>(kResidentKibMax));  // NOLINT
    std::abort();
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) {
    std::fprintf(stderr, "usage: %s CORPUS ITERATIONS [SEED [ONLY_ITERATION]]\n", argv[0]);
    return 2;
  }
  for (const int signal : {SIGABRT, SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGALRM, SIGPROF}) {
    std::signal(signal, SayWhere);
  }
  const std::vector<Input> corpus = ReadCorpus(argv[1]);
  if (corpus.empty()) {
    std::fprintf(stderr, "fuzz: no corpus in %s\n", argv[1]);
    return 2;
  }
  const int64_t iterations = std::atoll(argv[2]);
  g_seed = argc > 3 ? std::strtoull(argv[3], nullptr, 10) : 1;
  const int64_t only = argc > 4 ? std::atoll(argv[4]) : -1;
  for (const Input& input : corpus) Run(input);
  for (int64_t i = 0; i < iterations; ++i) {
    if (only >= 0 && i != only) continue;
    g_iteration = i;
    Run(Mutator(corpus, g_seed * 1'000'003 + i).Make());
  }
  std::printf("%zu inputs of the corpus, %lld mutations, seed %llu\n", corpus.size(),
              static_cast<long long>(iterations),        // NOLINT
              static_cast<unsigned long long>(g_seed));  // NOLINT
  return 0;
}
