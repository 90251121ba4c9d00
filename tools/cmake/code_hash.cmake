# Writes OUTPUT, a header with a hash of what FILES hold and of the text COMPILER.
set(hashes "${COMPILER}")
foreach(file ${FILES})
  file(SHA256 ${file} hash)
  string(APPEND hashes " ${hash}")
endforeach()
string(SHA256 hash "${hashes}")
string(SUBSTRING ${hash} 0 16 hash)
file(WRITE ${OUTPUT} "#ifndef DMUOND_SERVER_LANE_CODE_HASH_H_
#define DMUOND_SERVER_LANE_CODE_HASH_H_
namespace dmuond::server::lane {
inline constexpr char kCodeHash[] = \"${hash}\";
}  // namespace dmuond::server::lane
#endif  // DMUOND_SERVER_LANE_CODE_HASH_H_
")
