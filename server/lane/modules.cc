#include "server/lane/modules.h"

#include <link.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <map>
#include <string>
#include <system_error>

#include "absl/strings/match.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "server/common/module_id.h"

namespace dmuond::server::lane {
namespace {

// How the names of libraries begin whose code decides bits: matrix products, and what brings
// gradients from node to node. Of libm, results are compared (functions.h). An update of any other
// library, of the log or of messages say, changes no result, and keeps no lane from starting.
constexpr std::array<absl::string_view, 9> kComputing = {
    "libopenblas", "libblas.", "libgloo.",  "libcuda.",     "libcudart.",
    "libcublas",   "libnccl.", "libnvrtc.", "libnvJitLink."};

bool Computes(absl::string_view name) {
  return std::any_of(kComputing.begin(), kComputing.end(), [name](absl::string_view beginning) {
    return absl::StartsWith(name, beginning);
  });
}

// Where the program lies, or lay before it was replaced.
std::string ProgramPath() {
  std::error_code error;
  const std::string path = std::filesystem::read_symlink("/proc/self/exe", error).string();
  return std::string(absl::StripSuffix(path, " (deleted)"));
}

std::string IdOf(const dl_phdr_info& loaded, const std::string& path) {
  for (size_t i = 0; i < loaded.dlpi_phnum; ++i) {
    const ElfW(Phdr)& segment = loaded.dlpi_phdr[i];
    if (segment.p_type != PT_NOTE) continue;
    // NOLINTNEXTLINE(performance-no-int-to-ptr): that is how the loader says where it is
    const auto* notes = reinterpret_cast<const char*>(loaded.dlpi_addr + segment.p_vaddr);
    if (std::string id = BuildIdIn({notes, segment.p_memsz}, segment.p_align); !id.empty()) {
      return id;
    }
  }
  const absl::StatusOr<std::string> of_file = ModuleIdOf(path);
  return of_file.ok() ? *of_file : "a file that is there no more";
}

}  // namespace

void AddModules(v1::LaneBits& bits) {
  std::map<std::string, v1::LaneBits::Module> modules;
  const auto add = [](dl_phdr_info* loaded, size_t /*size*/, void* into) {
    auto& found = *static_cast<std::map<std::string, v1::LaneBits::Module>*>(into);
    const bool program = loaded->dlpi_name == nullptr || *loaded->dlpi_name == '\0';
    const std::string path = program ? ProgramPath() : loaded->dlpi_name;
    std::string name = std::filesystem::path(path).filename().string();
    if (!program && !Computes(name)) return 0;
    v1::LaneBits::Module& module = found[name];
    module.set_name(name);
    module.set_path(path);
    module.set_program(program);
    module.set_id(IdOf(*loaded, path));
    return 0;
  };
  ::dl_iterate_phdr(add, &modules);
  for (auto& [name, module] : modules) *bits.add_modules() = std::move(module);
}

}  // namespace dmuond::server::lane
