// poster.h: the sending half of a rail. [engine lock] A request is carried out while it is posted: by a plain copy into mapped
// memory, by process_vm_writev / readv, or, where the kernel refuses that, by a bounce through the connection's staging
// bytes, which the target copies when it polls. Only bounced requests complete later; requests behind them wait for
// their turn.
#pragma once

#include <array>
#include <memory>
#include <span>
#include <vector>

#include "provider/provider.h"
#include "providers/local/peers/outgoing.h"
#include "providers/local/transfers/copy.h"
#include "providers/local/transfers/copy_pool.h"
#include "providers/local/transfers/done_queue.h"
#include "providers/local/transfers/kernel_copy.h"

namespace asyncfabric::local {

class Poster {
 public:
  static constexpr size_t kMostTogether = 512;  // requests that are copied by the copy pool, or by the kernel, at once

  Poster(const Copier& copier, CopyPool& pool, bool bounce_when_refused)
      : copier_(copier), pool_(pool), bounce_when_refused_(bounce_when_refused), kernel_copy_(pool) {}

  PostResult post(std::span<const WorkRequest> requests);

  void settle();                                 // moves finished bounced transfers to done()
  void fail_all(Outgoing& link, Status status);  // what still waits on a link is over
  bool may_sleep();                              // nothing to settle and no refused link has room now
  DoneQueue& done() { return done_; }

 private:
  static constexpr uint64_t kMaxRunBytes = 2 * kMaxRequestBytes;  // how long a revoke may wait for one run
  static constexpr uint64_t kLargeBytes = 16384;  // payload that takes so long that news should not wait for it

  size_t accept(std::span<const WorkRequest> rest);
  size_t accept_transfer(Outgoing& link, std::span<const WorkRequest> rest);
  size_t copy_directly(Outgoing& link, const RemoteHandle& remote, const WorkRequest& request);
  size_t copy_together(Outgoing& link, const RemoteHandle& remote, std::span<const WorkRequest> rest);
  size_t copy_by_kernel(Outgoing& link, const RemoteHandle& remote, std::span<const WorkRequest> rest);
  size_t bounce(Outgoing& link, const RemoteHandle& remote, const WorkRequest& request);
  size_t send(Outgoing& link, const WorkRequest& request);
  size_t gather(Outgoing& link, const RemoteHandle& remote, std::span<const WorkRequest> rest);

  // INV-3, writer's side. False: the key is stale; nothing may be touched.
  bool hold(Outgoing& link, const RemoteHandle& remote);
  void let_go();

  // Tries, asks the target to wake us when it has consumed something, and tries once more. False: the request is not
  // taken.
  template <class Try>
  bool with_room(Outgoing& link, Try attempt) {
    if (attempt()) return true;
    close_batch(link);
    link.ring.ask_for_room(1);
    if (attempt()) return true;
    block(link);
    return false;
  }
  void block(Outgoing& link);
  bool room_for_imms(Outgoing& link, uint32_t imms) const;
  void add_imm(Outgoing& link, const WorkRequest& request);
  void close_batch(Outgoing& link);
  void announce(Outgoing& link);
  void touch(Outgoing& link);
  void finish(Outgoing& link, const WorkRequest& request, Status status);
  void defer(Outgoing& link, const Deferred& deferred);

  const Copier& copier_;
  CopyPool& pool_;
  bool bounce_when_refused_;
  DoneQueue done_;
  Outgoing* held_link_ = nullptr;  // whose active_slot is set
  uint32_t held_slot_ = 0;
  std::vector<Outgoing*> touched_;                  // within one post
  std::vector<std::shared_ptr<Outgoing>> waiting_;  // with deferred completions
  std::vector<std::shared_ptr<Outgoing>> blocked_;  // refused for want of room
  KernelCopy kernel_copy_;
  std::array<Piece, kMostTogether> together_;
};

}  // namespace asyncfabric::local
