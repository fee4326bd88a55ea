/* The sleep/wake protocol of one Node, checked exhaustively by spin.
 *
 * What it is for: no thread that waits for a signal word may sleep on after the word has arrived,
 * and while a Node is open somebody serves its doorbell and its sockets. What it must not know:
 * payload, frames, regions, time-outs' lengths. README.md maps the names to the C++ and lists the
 * configurations; check.sh runs them, and breaks the protocol on purpose (-DMUT_...) to prove that
 * each line which looks superfluous is not.
 *
 * Memory is x86-TSO: a plain store enters its thread's FIFO buffer and reaches `mem` whenever the
 * buffer's Flush process runs; a load looks into its own buffer first; a fence waits for an empty
 * buffer; an atomic read-modify-write (RMW) does so too and then acts on `mem` in one step. System
 * calls drain nothing here, although the kernel's locks do: the protocol must not lean on them.
 */

/* ---- configuration (set by check.sh) ---- */

#ifndef WAITERS
#define WAITERS 1               /* threads that wait, at most 3; thread i waits for word i */
#endif
#ifndef PROGRESS
#define PROGRESS 0              /* 1: the Node has its progress thread */
#endif
#ifndef ASYNC
#define ASYNC 9                 /* this waiter is an asyncio loop: it never drives, never follows */
#endif
#ifndef GIVES_UP
#define GIVES_UP 9              /* this waiter may time out whenever it is blocked */
#endif
#define SHM 1                   /* the word comes from a writer in another process */
#define NET 2                   /* ... from a frame on a socket */
#define NEVER 3                 /* ... never: the thread waits for ever, the others must not care */
#ifndef FROM0
#define FROM0 SHM
#endif
#ifndef FROM1
#define FROM1 SHM
#endif
#ifndef FROM2
#define FROM2 SHM
#endif
#ifndef ROUNDS
#define ROUNDS 1                /* thread 0 waits for the values 1..ROUNDS in turn */
#endif
#ifndef SERVICE
#define SERVICE 0               /* frames that nobody here waits for, e.g. a peer's read request */
#endif

#define rounds(i) ((i) == 0 -> ROUNDS : 1)
#define from(i) ((i) == 0 -> FROM0 : ((i) == 1 -> FROM1 : FROM2))

/* ---- memory ---- */

#define WORD(i) (i)             /* signal words of waiters 0..2 */
#define ARMED 3                 /* Node page: waiters past spinning */
#define SLEEPERS 4              /* followers in or near futex_wait(event_seq) */
#define DRIVING 5               /* NOBODY, USER or PROG */
#define YIELD 6                 /* yield_requested */
#define PARKED 7                /* futex word of the progress thread's park without a timer */
#define NOTIFIER 8              /* an asyncio loop wants its own eventfd rung */
#define EVENT 9                 /* event_seq; only its bumps, see stale[] */
#define CELLS 9

#define NOBODY 0
#define USER 1
#define PROG 2

#define P 3                     /* buffer of the progress thread; waiters 0..2, writers 4..6 */
#define WRITER(i) ((i) + 4)
#define BUFFERS 7
#define DEPTH 3                 /* asserted to be enough: no store is ever held back */
#define ADD 16                  /* a buffered increment: an RMW whose fence was taken away */

byte mem[CELLS];
typedef Buffer { byte n; byte cell[DEPTH]; byte val[DEPTH] };
Buffer buf[BUFFERS];

/* event_seq is an unbounded counter that is only compared for equality with a snapshot. stale[i]
   says whether it moved since thread i read it: exact, finite and free of wrap-around. */
bool stale[3];

/* ---- the kernel ---- */

bool doorbell;                  /* the Node's eventfd is readable */
bool notified;                  /* the asyncio loop's eventfd is readable */
bool asleep[3];                 /* queue of futex event_seq */
bool park_asleep;               /* queue of futex PARKED */
byte frames[3];                 /* complete frames that carry word i, not yet received */
byte service;                   /* frames without a word */

/* ---- ghosts: for the properties only ---- */

byte want[3];                   /* the value thread i waits for; 0 when it is not waiting */
byte drivers;                   /* threads between lock and unlock of `driving` */
byte polling;                   /* threads blocked in, or about to enter, epoll_wait */

#define READY (doorbell || frames[0] || frames[1] || frames[2] || service)

inline put(p, c, v) {
  d_step {
    assert(buf[p].n < DEPTH);
    buf[p].cell[buf[p].n] = c;
    buf[p].val[buf[p].n] = v;
    buf[p].n++
  }
}

proctype Flush(byte p) {        /* the oldest store reaches memory */
  byte c;
end:
  do
  :: d_step {
      buf[p].n > 0 ->
      c = buf[p].cell[0];
      if
      :: c == EVENT + ADD -> stale[0] = 1; stale[1] = 1; stale[2] = 1
      :: c >= ADD && c != EVENT + ADD -> mem[c - ADD] = mem[c - ADD] + buf[p].val[0]
      :: else -> mem[c] = buf[p].val[0]
      fi;
      buf[p].cell[0] = buf[p].cell[1]; buf[p].val[0] = buf[p].val[1];
      buf[p].cell[1] = buf[p].cell[2]; buf[p].val[1] = buf[p].val[2];
      buf[p].cell[2] = 0; buf[p].val[2] = 0;
      buf[p].n--;
      c = 0
    }
  od
}

inline load(p, c, x) {          /* newest own store, else memory */
  d_step {
    x = mem[c];
    if :: buf[p].n > 0 && buf[p].cell[0] == c -> x = buf[p].val[0] :: else fi;
    if :: buf[p].n > 1 && buf[p].cell[1] == c -> x = buf[p].val[1] :: else fi;
    if :: buf[p].n > 2 && buf[p].cell[2] == c -> x = buf[p].val[2] :: else fi
  }
}

inline fence(p) { buf[p].n == 0 }
inline increment(p, c) { d_step { buf[p].n == 0 -> mem[c] = mem[c] + 1 } }
inline decrement(p, c) { d_step { buf[p].n == 0 -> assert(mem[c] > 0); mem[c] = mem[c] - 1 } }
inline exchange(p, c, v, x) { d_step { buf[p].n == 0 -> x = mem[c]; mem[c] = v } }

inline try_lock(p, who, x) {    /* x: who held `driving` before; NOBODY means that we have it now */
  d_step {
    buf[p].n == 0 ->
    x = mem[DRIVING];
    if
    :: x == NOBODY -> mem[DRIVING] = who; drivers++; assert(drivers == 1)
    :: else
    fi
  }
}

inline bump(p) {                /* event_seq += 1 */
#ifdef MUT_NO_NOTIFY_FENCE
  put(p, EVENT + ADD, 1)
#else
  d_step { buf[p].n == 0 -> stale[0] = 1; stale[1] = 1; stale[2] = 1 }
#endif
}

/* ---- the protocol ---- */

inline wake_followers() { d_step { asleep[0] = 0; asleep[1] = 0; asleep[2] = 0 } }

inline notify(p, x) {           /* something changed: every thread of the Node shall look again */
  bump(p);
  load(p, SLEEPERS, x);
  if :: x > 0 -> wake_followers() :: else fi;
#if ASYNC < WAITERS
  load(p, NOTIFIER, x);
  if :: x > 0 -> notified = 1 :: else fi;
#endif
  x = 0
}

inline unpark(p, x) {
  load(p, PARKED, x);
  if
  :: x == 1 -> exchange(p, PARKED, 0, x); park_asleep = 0
  :: else
  fi;
  x = 0
}

inline unlock(p) {
  d_step { drivers--; polling--; put(p, DRIVING, NOBODY) }
}

/* A waiter stops leading. The unlock comes first and the bump always follows, asleep or not: a
   follower that lost try_lock to us may not have reached its futex yet. */
inline hand_over(p, x) {
#if defined(MUT_NO_HAND_OVER)
  unlock(p); fence(p);
  load(p, SLEEPERS, x);
  if :: x > 0 :: else -> unpark(p, x) fi;
#elif defined(MUT_BUMP_BEFORE_UNLOCK)
  bump(p);
  load(p, SLEEPERS, x);
  if :: x > 0 -> wake_followers() :: else fi;
  unlock(p); fence(p);
  if :: x > 0 :: else -> unpark(p, x) fi;
#elif defined(MUT_BUMP_IF_ASLEEP)
  unlock(p); fence(p);
  load(p, SLEEPERS, x);
  if :: x > 0 -> bump(p); wake_followers() :: else -> unpark(p, x) fi;
#else
  unlock(p);
  bump(p);
  load(p, SLEEPERS, x);
  if
  :: x > 0 ->
    wake_followers()
#ifdef ALWAYS_UNPARK
    ; unpark(p, x)
#endif
  :: else ->
#ifndef MUT_NO_HAND_BACK
    unpark(p, x)
#else
    skip
#endif
  fi;
#endif
  x = 0
}

/* A waiter returns without having led. The leader before it may have counted on it (it was asleep
   when that one looked), so it must not leave the Node to a parked progress thread. */
inline leave(p, x) {
#if !defined(MUT_FOLLOWER_OWES_NOTHING) && !defined(MUT_NO_HAND_BACK) && !defined(ALWAYS_UNPARK)
  load(p, DRIVING, x);
  if :: x == NOBODY -> unpark(p, x) :: else fi;
  x = 0
#else
  skip
#endif
}

inline receive(p, i) {          /* a whole frame: the driver stores the word itself */
  atomic { frames[i] > 0 -> frames[i]--; put(p, WORD(i), mem[WORD(i)] + 1) }
}

inline drive_once(p, x) {       /* epoll_wait and its consequences; the caller holds `driving` */
  READY;
#ifdef MUT_NOTIFY_BEFORE_DRAIN
  notify(p, x);
#endif
  doorbell = 0;
  if
  :: receive(p, 0)
  :: receive(p, 1)
  :: receive(p, 2)
  :: atomic { service > 0 -> service-- }
  :: atomic { !(frames[0] || frames[1] || frames[2] || service) -> skip }
  fi;
#ifndef MUT_NOTIFY_BEFORE_DRAIN
  notify(p, x)
#endif
}

/* node.wait_word(word me, value want[me]). The bounded spin before arming is left out: it only
   repeats the first check. */
proctype Waiter(byte me) {
  byte x;
  byte round = 1;
again:
  want[me] = round;
  load(me, WORD(me), x);
  if :: x >= want[me] -> x = 0; goto done :: else -> x = 0 fi;

#ifdef MUT_NO_WAITER_FENCE
  put(me, ARMED + ADD, 1);
#else
  increment(me, ARMED);
#endif

look:
  stale[me] = 0;                /* seq = event_seq: before the word is read */
#ifndef MUT_FOLLOWER_NO_RECHECK
  load(me, WORD(me), x);
  if :: x >= want[me] -> x = 0; goto follower_done :: else -> x = 0 fi;
#endif
  try_lock(me, USER, x);
  if
  :: x == NOBODY -> polling++; goto lead
  :: x == USER -> x = 0
  :: x == PROG -> x = 0; put(me, YIELD, 1); doorbell = 1
  fi;

  increment(me, SLEEPERS);
  atomic {                      /* futex_wait(event_seq, seq): compare and queue are one step */
    if :: !stale[me] -> asleep[me] = 1 :: else fi
  }
  if
  :: !asleep[me] -> decrement(me, SLEEPERS); goto look
  :: atomic { me == GIVES_UP && asleep[me] -> asleep[me] = 0 }
     decrement(me, SLEEPERS); goto follower_done
  fi;

lead:
#ifndef MUT_LEADER_NO_RECHECK
  load(me, WORD(me), x);
  if :: x >= want[me] -> x = 0; goto leader_done :: else -> x = 0 fi;
#endif
  if
  :: drive_once(me, x)
  :: me == GIVES_UP -> goto leader_done
  fi;
#ifdef MUT_LEADER_NO_RECHECK
  load(me, WORD(me), x);
  if :: x >= want[me] -> x = 0; goto leader_done :: else -> x = 0 fi;
#endif
  goto lead;

leader_done:
  hand_over(me, x);
  decrement(me, ARMED);
  goto done;

follower_done:
  decrement(me, ARMED);
  leave(me, x);

done:
  want[me] = 0;
  if :: round < rounds(me) -> round++; goto again :: else fi
}

/* await word.reached(...): the loop sleeps in its selector until the Notifier's eventfd is rung. */
proctype Async(byte me) {
  byte x;
  want[me] = 1;
  put(me, NOTIFIER, 1);
  increment(me, ARMED);
look:
  load(me, WORD(me), x);
  if :: x >= want[me] -> x = 0; goto done :: else -> x = 0 fi;
  atomic { notified -> notified = 0 }
  goto look;
done:
  put(me, NOTIFIER, 0);
  decrement(me, ARMED);
  want[me] = 0
}

proctype Progress() {
  byte x;
top:
  try_lock(P, PROG, x);
  if :: x == NOBODY -> polling++ :: else -> x = 0; goto park fi;
  put(P, YIELD, 0);             /* what is left of an old request; a lost new one is repeated */

drive:
  drive_once(P, x);
  load(P, YIELD, x);
  if :: x == 0 -> goto drive :: else -> x = 0 fi;
  put(P, YIELD, 0);
  unlock(P);
  notify(P, x);

park:                           /* at most T, so nothing has to wake us */
  load(P, DRIVING, x);
  if :: x != USER -> x = 0; goto top :: else -> x = 0 fi;
  /* The same leader for a whole period, or not: either may be. */
  if :: goto park :: skip fi;

  put(P, PARKED, 1);
#ifndef MUT_NO_PARK_FENCE
  fence(P);
#endif
  load(P, DRIVING, x);
  if :: x != USER -> x = 0; put(P, PARKED, 0); goto top :: else -> x = 0 fi;
  atomic { if :: mem[PARKED] == 1 -> park_asleep = 1 :: else fi }
  !park_asleep;
  put(P, PARKED, 0);
  goto top
}

/* ---- the world outside ---- */

proctype Writer(byte i) {       /* one process, one word, values 1..rounds */
  byte x;
  byte v = 1;
  do
  :: v <= rounds(i) ->
    put(WRITER(i), WORD(i), v);
#ifndef MUT_NO_WRITER_FENCE
    fence(WRITER(i));
#endif
    load(WRITER(i), ARMED, x);
    if :: x > 0 -> x = 0; doorbell = 1 :: else fi;
    v++
  :: else -> break
  od
}

proctype Net() {
  byte sent[3];
  byte asked;
  do
  :: FROM0 == NET && sent[0] < rounds(0) -> atomic { sent[0]++; frames[0]++ }
  :: WAITERS > 1 && FROM1 == NET && sent[1] < 1 -> atomic { sent[1]++; frames[1]++ }
  :: WAITERS > 2 && FROM2 == NET && sent[2] < 1 -> atomic { sent[2]++; frames[2]++ }
  :: asked < SERVICE -> atomic { asked++; service++ }
  :: else -> break
  od
}

/* ---- properties ---- */

#define LOST(i) (want[i] != 0 && mem[WORD(i)] >= want[i])

/* `timeout` holds when nothing can move any more: not a store buffer, not a timer. Then nobody may
   sleep whose word is there, nothing may wait to be served, and somebody must be listening. */
proctype Monitor() {
  byte waiting;
  atomic {
    timeout ->
    assert(!LOST(0) && !LOST(1) && !LOST(2));
    waiting = (want[0] != 0) + (want[1] != 0) + (want[2] != 0);
    assert(mem[ARMED] == waiting);
    assert(polling == ((PROGRESS || waiting > 0) -> 1 : 0));
    assert(!(PROGRESS || waiting > 0) || !READY)
  }
}

init {
  byte i;
  atomic {
    do
    :: i < WAITERS ->
      if :: i == ASYNC -> run Async(i) :: else -> run Waiter(i) fi;
      run Flush(i);
      if :: from(i) == SHM -> run Writer(i); run Flush(WRITER(i)) :: else fi;
      i++
    :: else -> break
    od;
    if :: PROGRESS -> run Progress(); run Flush(P) :: else fi;
    run Net();
    run Monitor();
    i = 0
  }
}

#ifdef LIVENESS
/* Under weak fairness: a word that has arrived is noticed, by each thread and each time. */
ltl noticed { [] (LOST(0) -> <> !LOST(0)) && [] (LOST(1) -> <> !LOST(1)) }
#endif
