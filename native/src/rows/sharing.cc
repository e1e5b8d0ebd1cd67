// sharing.cc: see sharing.h.
#include "rows/sharing.h"

#include <memory>
#include <mutex>

#include "asyncfabric/rows.h"

namespace asyncfabric::rows {
namespace {

struct Helpers {
  std::mutex mutex;  // held while a loop has the pool
  std::unique_ptr<WorkPool> pool;
};

std::unique_ptr<WorkPool> pool_of(uint32_t threads) {
  return std::make_unique<WorkPool>((threads != 0 ? threads : WorkPool::usual_size()) - 1, "af-rows");
}

Helpers& helpers() {
  static Helpers* const instance =
      new Helpers{{}, pool_of(0)};  // never destroyed: loops may run during static destruction
  return *instance;
}

}  // namespace

bool run_with_helpers(SharedWork& work, size_t shares) {
  Helpers& found = helpers();
  const std::unique_lock lock(found.mutex, std::try_to_lock);
  if (!lock.owns_lock() || !found.pool->present()) return false;
  found.pool->run(work, shares);
  return true;
}

void use_threads(uint32_t threads) {
  Helpers& found = helpers();
  const std::lock_guard lock(found.mutex);
  found.pool = pool_of(threads);
}

}  // namespace asyncfabric::rows
