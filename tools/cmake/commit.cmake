# Writes OUTPUT, the commit that this build is of: COMMIT, or what git says of SOURCE; "unknown" outside git. A file that
# would be the same stays, so that nothing is built again.
if(NOT COMMIT AND EXISTS "${SOURCE}/.git")
  execute_process(
    COMMAND git -C ${SOURCE} describe --always --dirty --abbrev=12 --exclude=*
    OUTPUT_VARIABLE COMMIT OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
endif()
if(NOT COMMIT)
  set(COMMIT unknown)
endif()
set(text "#include \"server/commit.h\"

namespace dmuond::server {

const char kBuildCommit[] = \"${COMMIT}\";

}  // namespace dmuond::server
")
set(before "")
if(EXISTS "${OUTPUT}")
  file(READ "${OUTPUT}" before)
endif()
if(NOT before STREQUAL text)
  file(WRITE "${OUTPUT}" "${text}")
endif()
