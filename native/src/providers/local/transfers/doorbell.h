// doorbell.h: how one end of a connection wakes the other: a stream socket of the two, and the other's board, which shows whether it sleeps.
// Nobody else rings by it. Whoever fills it, empties it, ends it or lies on its board loses its own wake-ups and nobody else's, and
// ringing never blocks. Ringing costs a system call only when the other sleeps, once for each sleep.
//   sleeper: sleep = a number that was never there; look for work once more; none -> sleep on the wait set
//   ringer:  make news visible; barrier; sleep is a number that it did not ring for -> send a byte
// Either the sleeper's last look sees the news, or the ringer sees the number: both are separated by a full barrier. A byte stays in the
// socket until the sleeper is awake, and a socket without room for one has one.
#pragma once

#include <sys/types.h>

#include <memory>
#include <utility>

#include "asyncfabric/status.h"
#include "base/unique_fd.h"
#include "providers/local/memory/mapping.h"
#include "providers/local/memory/segment.h"
#include "providers/local/transfers/wait_set.h"

namespace asyncfabric::local {

class Doorbell {
 public:
  // The two ends of a new one.
  static Status make(UniqueFd* ours, UniqueFd* theirs);
  // Our end, and the file of the other's board. kPeerRejected: it is no such socket of `peer`, or no board.
  static Status open(UniqueFd end, const UniqueFd& board_file, pid_t peer, std::shared_ptr<WaitSet> waits,
                     std::unique_ptr<Doorbell>* out);
  ~Doorbell() { waits_->leave(std::move(end_)); }
  Doorbell(const Doorbell&) = delete;
  Doorbell& operator=(const Doorbell&) = delete;

  const Board& board() const { return *board_->as<const Board>(); }  // the other's

  // [engine lock] Call after a full barrier that follows the news.
  void wake() {
    const uint64_t sleep = board().sleep.load(std::memory_order_relaxed);
    if (sleep == 0 || sleep == rung_for_) return;
    if (ring()) rung_for_ = sleep;
  }

 private:
  Doorbell(UniqueFd end, std::shared_ptr<Mapping> board, std::shared_ptr<WaitSet> waits)
      : end_(std::move(end)), board_(std::move(board)), waits_(std::move(waits)) {}
  bool ring() const;

  UniqueFd end_;
  std::shared_ptr<Mapping> board_;
  std::shared_ptr<WaitSet> waits_;
  uint64_t rung_for_ = 0;  // the newest sleep of the other that we rang for
};

}  // namespace asyncfabric::local
