# Writes OUTPUT, a source with a hash of what FILES hold and of the text COMPILER.
set(hashes "${COMPILER}")
foreach(file ${FILES})
  file(SHA256 ${file} hash)
  string(APPEND hashes " ${hash}")
endforeach()
string(SHA256 hash "${hashes}")
string(SUBSTRING ${hash} 0 16 hash)
file(WRITE ${OUTPUT} "#include \"server/lane/code_hash.h\"

namespace dmuond::server::lane {

const char kCodeHash[] = \"${hash}\";

}  // namespace dmuond::server::lane
")
