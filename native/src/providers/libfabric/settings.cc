// settings.cc: see settings.h. There is no other way to say these things to libfabric 1.17 than its environment variables. What the
// user set stays. Ours are set only while the library reads them, so that children of the process do not inherit them.
#include "providers/libfabric/settings.h"

#include <cstdlib>

namespace asyncfabric::libfabric {
namespace {

class Setting {
 public:
  Setting(const char* name, const char* value) : name_(name), ours_(std::getenv(name) == nullptr) {
    if (ours_) setenv(name, value, 0);
  }
  ~Setting() {
    if (ours_) unsetenv(name_);
  }
  Setting(const Setting&) = delete;
  Setting& operator=(const Setting&) = delete;

 private:
  const char* name_;
  bool ours_;
};

}  // namespace

void initialise(const Library& library) {
  // verbs;ofi_rxm makes each CQ large enough for this many peers with full queues. Its default of 256 asks for more entries than
  // soft-RoCE has (32,767), and opening fails with EINVAL. Each of our peers has an endpoint, and so a CQ, of its own.
  const Setting peers("FI_UNIVERSE_SIZE", "8");
  // The cache keeps a registration, with all rights, after it was closed: a revoked key would still write (INV-3). The engine
  // registers regions once and keeps them, so there is nothing to gain from it.
  const Setting cache("FI_MR_CACHE_MAX_COUNT", "0");
  // efa before 1.19 has no option for it: a hidden second transport inside of a rail, see efa_profile.cc.
  const Setting shm("FI_EFA_ENABLE_SHM_TRANSFER", "0");
  fi_info* found = nullptr;
  if (library.fi_getinfo(kOldestApi, nullptr, nullptr, FI_PROV_ATTR_ONLY, nullptr, &found) == 0)
    library.fi_freeinfo(found);
}

}  // namespace asyncfabric::libfabric
