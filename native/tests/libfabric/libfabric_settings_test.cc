// libfabric_settings_test.cc: what the library finds in the environment, and what other threads of the process find meanwhile.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <string>
#include <vector>

#include "providers/libfabric/device/settings.h"

namespace asyncfabric::libfabric {
namespace {

std::string seen_size, seen_cache;
char** table_of_before = nullptr;
std::vector<char*> entries_of_before;

std::vector<char*> entries(char** table) {
  std::vector<char*> found;
  for (; *table != nullptr; ++table) found.push_back(*table);
  return found;
}

int read_settings(uint32_t, const char*, const char*, uint64_t, const fi_info*, fi_info**) {
  for (const auto& [name, seen] : {std::pair{"FI_UNIVERSE_SIZE", &seen_size}, {"FI_MR_CACHE_MAX_COUNT", &seen_cache}})
    if (const char* value = std::getenv(name); value != nullptr) *seen = value;
  // A thread that began to look a variable up before goes on in the table of before.
  EXPECT_EQ(entries(table_of_before), entries_of_before);
  return -FI_ENODATA;
}

TEST(LibfabricSettings, AreThereForTheLibraryAndMoveNothingUnderOtherThreads) {
  unsetenv("FI_UNIVERSE_SIZE");
  setenv("FI_MR_CACHE_MAX_COUNT", "17", 1);  // a user's
  Library library;
  library.fi_getinfo = read_settings;
  for (int round = 0; round < 3; ++round) {
    table_of_before = environ;
    entries_of_before = entries(environ);
    seen_size = seen_cache = "";
    initialise(library);
    EXPECT_EQ(seen_size, "8");
    EXPECT_EQ(seen_cache, "17");
    EXPECT_EQ(environ, table_of_before) << "the table of variables was moved";
    EXPECT_EQ(entries(environ), entries_of_before);
    EXPECT_EQ(std::getenv("FI_UNIVERSE_SIZE"), nullptr) << "children would inherit it";
  }
  unsetenv("FI_MR_CACHE_MAX_COUNT");
}

}  // namespace
}  // namespace asyncfabric::libfabric
