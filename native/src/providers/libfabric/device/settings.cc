// settings.cc: see settings.h. There is no other way to give these to libfabric 1.17 than its environment variables. What the user set
// stays. Ours are there only while the library reads them, so that children of the process do not inherit them.
#include "providers/libfabric/device/settings.h"

#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <deque>
#include <string>
#include <utility>
#include <vector>

namespace asyncfabric::libfabric {
namespace {

// A table of variables and the strings of ours in it. A thread may read them at any time, so they stay until the process ends.
struct Kept {
  std::deque<std::string> strings;
  std::vector<char*> table;

  static Kept& one_more() {  // libraries are loaded one at a time
    static auto& all = *new std::deque<Kept>;
    return all.emplace_back();
  }
};

// Variables that the process has while this object lives. setenv() may move the table of variables under another thread that looks one up;
// here a whole table of our own takes the place of the other in one store, and no string or table that a thread may read ever goes away.
class Settings {
 public:
  explicit Settings(std::initializer_list<std::pair<std::string, std::string>> settings) {
    for (char** variable = theirs_; variable != nullptr && *variable != nullptr; ++variable)
      table_.push_back(*variable);
    for (const auto& [name, value] : settings)
      if (std::getenv(name.c_str()) == nullptr) table_.push_back(kept_.strings.emplace_back(name + "=" + value).data());
    table_.push_back(nullptr);
    std::atomic_ref(environ).store(table_.data(), std::memory_order_release);
  }
  // A thread that set a variable meanwhile made another table, which has it and ours: that one stays.
  ~Settings() {
    char** ours = table_.data();
    std::atomic_ref(environ).compare_exchange_strong(ours, theirs_, std::memory_order_acq_rel);
  }
  Settings(const Settings&) = delete;
  Settings& operator=(const Settings&) = delete;

 private:
  char** const theirs_ = environ;
  Kept& kept_ = Kept::one_more();
  std::vector<char*>& table_ = kept_.table;
};

}  // namespace

void initialise(const Library& library) {
  const Settings settings{
      // verbs;ofi_rxm makes each CQ large enough for this many peers with full queues. Its default of 256 asks for more entries than
      // soft-RoCE has (32,767), and opening fails with EINVAL. Each of our peers has an endpoint, and so a CQ, of its own.
      {"FI_UNIVERSE_SIZE", "8"},
      // The cache keeps a registration, with all rights, after it was closed: a revoked key would still write (INV-3). The engine
      // registers regions once and keeps them, so there is nothing to gain from it.
      {"FI_MR_CACHE_MAX_COUNT", "0"},
      // efa before 1.19 has no option for it: a hidden second transport inside of a rail, see efa_profile.cc.
      {"FI_EFA_ENABLE_SHM_TRANSFER", "0"},
  };
  fi_info* found = nullptr;
  if (library.fi_getinfo(kOldestApi, nullptr, nullptr, FI_PROV_ATTR_ONLY, nullptr, &found) == 0)
    library.fi_freeinfo(found);
}

}  // namespace asyncfabric::libfabric
