// wait_set.h: what a rail sleeps on: its end of each connection's doorbell, and an eventfd that the rail's own threads ring. Whether it
// sleeps stands on its board, which peers can only read: no peer can take that word away from the others.
#pragma once

#include <memory>
#include <mutex>
#include <utility>

#include "asyncfabric/status.h"
#include "base/unique_fd.h"
#include "providers/local/memory/mapping.h"
#include "providers/local/memory/segment.h"

namespace asyncfabric::local {

class WaitSet {
 public:
  static Status open(std::shared_ptr<Mapping> board, std::shared_ptr<WaitSet>* out);

  // [engine lock]
  int fd() const { return set_.get(); }
  void fall_asleep();  // from here on news is rung for; look for it once more before sleeping
  void stay_awake() { board_->as<Board>()->sleep.store(0, std::memory_order_seq_cst); }
  void drain();  // what was rung so far makes fd() readable no more

  // Any thread of this rail, after a full barrier that follows its news.
  void wake() const;

  // Any thread.
  Status join(int doorbell);
  void leave(UniqueFd doorbell);  // and closes it

 private:
  WaitSet(std::shared_ptr<Mapping> board, UniqueFd set, UniqueFd own)
      : board_(std::move(board)), set_(std::move(set)), own_(std::move(own)) {}

  std::shared_ptr<Mapping> board_;
  UniqueFd set_;
  UniqueFd own_;
  uint64_t sleeps_ = 0;  // [engine lock]
  std::mutex mutex_;     // a doorbell that drain() reads is not closed meanwhile, nor its number given to another file
};

}  // namespace asyncfabric::local
