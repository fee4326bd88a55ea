/* The sleep/wake protocol of one Node (cpp/loop/progress.cc), checked exhaustively by spin.
 *
 * What it is for: no thread sleeps on after what it waits for has happened, and while a Node is
 * open somebody serves its doorbell, its sockets and its jobs. What it must not know: payload,
 * frames' contents, regions, lengths of time-outs. README.md maps the names to the C++ and lists
 * the configurations; check.sh runs them, and breaks the protocol on purpose (-DMUT_...) to prove
 * that the lines which look superfluous are not.
 *
 * Memory is x86-TSO: a plain store enters its thread's FIFO buffer and reaches `mem` whenever the
 * buffer's Flush process runs; a load looks into its own buffer first; a fence waits until the
 * buffer is empty; an atomic read-modify-write (RMW) and a seq_cst store wait too and then act on
 * `mem` in one step. Signal words are stored plainly here although the C++ uses a CAS: the proof
 * then holds where a CAS is no fence. System calls drain nothing, although the kernel's locks do.
 *
 * An `atomic` joins a step that others see with steps that nobody else can see or that only wait
 * (own buffer, own locals, ghosts); it hides no interleaving.
 */

/* ---- configuration (set by check.sh) ---- */

#ifndef WAITERS
#define WAITERS 1               /* threads that wait, at most 3; thread i waits for word i */
#endif
#ifndef PROGRESS
#define PROGRESS 0              /* 1: with the Node's progress thread */
#endif
#ifndef ASYNC
#define ASYNC 9                 /* this waiter is an asyncio loop: it neither drives nor follows */
#endif
#ifndef FOLLOWS
#define FOLLOWS 9               /* this waiter never drives: Transfer.wait(lead=False) */
#endif
#ifndef GIVES_UP
#define GIVES_UP 9              /* this waiter's deadline may pass at any time */
#endif
#define SHM 1                   /* the word comes from a writer in another process */
#define NET 2                   /* ... from a frame on a socket */
#define JOB 3                   /* ... from a job that another thread posts */
#define OWN 4                   /* ... from another thread of this process, which does not drive */
#define NEVER 5                 /* ... never: the thread waits for ever; the others must not care */
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

/* Without jobs and waiters that never drive, URGENT is never set, and the steps that clear and read
   it are left out. */
#define JOBS (FROM0 == JOB || FROM1 == JOB || FROM2 == JOB || FOLLOWS < WAITERS)

#define rounds(i) ((i) == 0 -> ROUNDS : 1)
#define from(i) ((i) == 0 -> FROM0 : ((i) == 1 -> FROM1 : FROM2))

/* ---- memory ---- */

#define WORD(i) (i)             /* signal words of waiters 0..2 */
#define ARMED 3                 /* page->armed: waiters past spinning, armed notifiers */
#define SLEEPERS 4              /* followers in or near futex_wait(event_seq) */
#define DRIVER 5                /* NOBODY, WAITER or THREAD */
#define YIELD 6                 /* a follower asks the progress thread for the lead */
#define PARK 7                  /* park_state: AWAKE, PARKED (with a timer), FOR_EVER */
#define URGENT 8                /* the progress thread shall not leave the lead to waiters */
#define NOTIFIERS 9             /* armed notifiers */
#define EVENT 10                /* event_seq: never stored here, see stale[] */
#define CELLS 10

#define NOBODY 0
#define WAITER 1
#define THREAD 2

#define AWAKE 0
#define PARKED 1
#define FOR_EVER 2

#define T 3                     /* buffer of the progress thread; waiters 0..2, writers 4..6 */
#define WRITER(i) ((i) + 4)
#define BUFFERS 7
#define DEPTH 3                 /* asserted to be enough: no store is ever held back */
#define ADD 16                  /* a buffered increment: an RMW whose fence was taken away */

byte mem[CELLS];
typedef Buffer { byte n; byte cell[DEPTH]; byte val[DEPTH] };
Buffer buf[BUFFERS];

/* event_seq and park_word are counters that are only compared for equality with a snapshot. These
   say whether they moved since thread i (the progress thread) took it: exact, and finite. */
bool stale[3];
bool park_stale;
bool driven;                    /* a waiter has driven since the progress thread parked */

byte jobs[3];                   /* queue under a mutex; a job raises word i */
#define HAVE_JOBS (jobs[0] || jobs[1] || jobs[2])

/* ---- the kernel ---- */

bool doorbell;                  /* a doorbell is readable    */
bool notified;                  /* the asyncio loop's eventfd is readable */
bool asleep[3];                 /* queue of futex event_seq */
bool park_asleep;               /* queue of futex park_word, without a timer */
byte frames[3];                 /* frames that carry word i, not yet received */
byte service;                   /* frames without a word */

#define READY (doorbell || frames[0] || frames[1] || frames[2] || service)

/* ---- ghosts: for the properties only ---- */

byte want[3];                   /* the value thread i waits for; 0 when it is not waiting */
byte drivers;                   /* threads between a successful try_drive and release_drive */

/* ---- loads, stores, fences ---- */

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
inline store(p, c, v) { d_step { buf[p].n == 0 -> mem[c] = v } }   /* seq_cst */
inline increment(p, c) { d_step { buf[p].n == 0 -> mem[c] = mem[c] + 1 } }
inline decrement(p, c) { d_step { buf[p].n == 0 -> assert(mem[c] > 0); mem[c] = mem[c] - 1 } }
inline exchange(p, c, v, x) { d_step { buf[p].n == 0 -> x = mem[c]; mem[c] = v } }

/* ---- waking ---- */

inline bump(p) {                /* event_seq += 1 */
#ifdef MUT_WAKE_RELAXED
  put(p, EVENT + ADD, 1)
#else
  d_step { buf[p].n == 0 -> stale[0] = 1; stale[1] = 1; stale[2] = 1 }
#endif
}

inline wake_followers() { d_step { asleep[0] = 0; asleep[1] = 0; asleep[2] = 0 } }

inline unpark() { d_step { park_stale = 1; park_asleep = 0 } }

inline wake(p, x) {             /* what somebody waits for may have happened */
  bump(p);
  atomic { load(p, SLEEPERS, x); if :: x == 0 :: else -> x = 1 fi }
  if :: x == 1 -> atomic { wake_followers(); x = 0 } :: else fi;
#if ASYNC < WAITERS
  atomic { load(p, NOTIFIERS, x); if :: x > 0 -> x = 0; notified = 1 :: else fi }
#endif
}

inline notify(p, x) {           /* the same by a thread that need not be the driver */
  wake(p, x);
#ifndef MUT_NOTIFY_NO_KICK
  atomic { load(p, DRIVER, x); if :: x == WAITER -> x = 0; doorbell = 1 :: else -> x = 0 fi }
#endif
}

inline attention(p, x) {        /* a job was queued */
  store(p, URGENT, 1);
  load(p, DRIVER, x);
  if
  :: atomic { x == NOBODY -> unpark() }
#ifndef MUT_POST_NO_KICK
  :: atomic { x != NOBODY -> doorbell = 1; x = 0 }
#else
  :: atomic { x != NOBODY -> x = 0 }
#endif
  fi
}

/* ---- driving ---- */

inline try_drive(p, who, x) {   /* x: who drove before; NOBODY means that we do now */
  d_step {
    buf[p].n == 0 ->
    x = mem[DRIVER];
    if
    :: x == NOBODY -> mem[DRIVER] = who; drivers++; assert(drivers == 1)
    :: else
    fi
  }
}

/* One round of the loop; the caller drives. In C++ the round goes on to a non-blocking epoll_wait
   after a job; here the next round does that. */
inline drive_once(p, x) {
  d_step { if :: p != T -> driven = 1 :: else fi }
#if JOBS
  store(p, URGENT, 0);
#endif
  if
  :: atomic { jobs[0] > 0 -> jobs[0]--; put(p, WORD(0), mem[WORD(0)] + 1) }
  :: atomic { jobs[1] > 0 -> jobs[1]--; put(p, WORD(1), mem[WORD(1)] + 1) }
  :: atomic { jobs[2] > 0 -> jobs[2]--; put(p, WORD(2), mem[WORD(2)] + 1) }
  :: atomic { !HAVE_JOBS ->
      if
      :: READY ->               /* epoll_wait */
#ifdef MUT_WAKE_BEFORE_DRAIN
        skip
      fi
    }
    wake(p, x);
    atomic {
      if
      :: true ->
#endif
        doorbell = 0;           /* drained before anybody is told to look again */
        if
        :: frames[0] > 0 -> frames[0]--; put(p, WORD(0), mem[WORD(0)] + 1)
        :: frames[1] > 0 -> frames[1]--; put(p, WORD(1), mem[WORD(1)] + 1)
        :: frames[2] > 0 -> frames[2]--; put(p, WORD(2), mem[WORD(2)] + 1)
        :: service > 0 -> service--
        :: else
        fi
      :: p == GIVES_UP          /* the caller's deadline passed */
      fi
    }
  fi;
#ifndef MUT_WAKE_BEFORE_DRAIN
  wake(p, x)
#endif
}

/* The same with a time limit of 0: what is urgent, and nothing is waited for. */
inline drive_once_now(p, x) {
  store(p, URGENT, 0);
  if
  :: atomic { jobs[0] > 0 -> jobs[0]--; put(p, WORD(0), mem[WORD(0)] + 1) }
  :: atomic { jobs[1] > 0 -> jobs[1]--; put(p, WORD(1), mem[WORD(1)] + 1) }
  :: atomic { jobs[2] > 0 -> jobs[2]--; put(p, WORD(2), mem[WORD(2)] + 1) }
  :: !HAVE_JOBS
  fi;
  wake(p, x)
}

inline called(p, x) {           /* urgent, and nobody drives */
  load(p, URGENT, x);
  if
  :: x == 1 -> atomic { load(p, DRIVER, x); if :: x == NOBODY -> x = 1 :: else -> x = 0 fi }
  :: else
  fi
}

inline unlock(p) {
#ifdef MUT_UNLOCK_RELAXED
  atomic { drivers--; put(p, DRIVER, NOBODY) }
#else
  d_step { buf[p].n == 0 -> mem[DRIVER] = NOBODY; drivers-- }
#endif
}

inline hand_over(p, x) {        /* to the followers */
#ifndef MUT_NO_HAND_OVER
  load(p, SLEEPERS, x);
#ifdef MUT_HAND_BACK_OR_OVER
  woke = (x > 0);
#endif
  if :: x > 0 -> bump(p); atomic { wake_followers(); x = 0 } :: else fi
#else
  skip
#endif
}

/* Unlock first; then wake the followers; then the thread, whether or not there were followers:
   they may all have what they want and leave. */
inline release_drive(p, x) {  /* by a waiter; the thread: see yield */
#ifdef MUT_HAND_OVER_BEFORE_UNLOCK
  hand_over(p, x);
  unlock(p);
#else
  unlock(p);
  hand_over(p, x);
#endif
#if JOBS
  atomic { load(p, URGENT, x); if :: HAVE_JOBS -> x = 1 :: else fi }
  if :: x > 0 -> store(p, URGENT, 1); unpark() :: else fi;
#endif
#ifndef MUT_NO_HAND_BACK
  load(p, PARK, x);
#ifdef MUT_HAND_BACK_OR_OVER
  if :: x == FOR_EVER && !woke -> unpark() :: else fi;
#else
  if :: x == FOR_EVER -> unpark() :: else fi;
#endif
#endif
  x = 0
}

/* Progress::wait_slow(). The bounded spin before it is left out: it only repeats the first look,
   and a spinning leader is a leader whose epoll_wait happens to return at once. */
proctype Waiter(byte me) {
  byte x;
  byte round = 1;
  bool leading, late;
#ifdef MUT_HAND_BACK_OR_OVER
  bool woke;
#endif

again:
  atomic {
    want[me] = round;
    load(me, WORD(me), x);
    if :: x >= want[me] -> x = 0; goto done :: else -> x = 0 fi
  }
#ifdef MUT_NO_WAITER_FENCE
  put(me, ARMED + ADD, 1);
#else
  increment(me, ARMED);
#endif

look:
#ifndef MUT_SEQ_AFTER_LOOK
  stale[me] = 0;                /* seq = event_seq, before the look at the word */
#endif
#ifdef MUT_FOLLOWER_NO_LOOK
  if :: !leading -> goto looked :: else fi;
#endif
  atomic {
    load(me, WORD(me), x);
    if :: x >= want[me] -> x = 0; goto leave :: else -> x = 0 fi;
    if :: late -> goto leave :: else fi
  }
looked:
#ifdef MUT_SEQ_AFTER_LOOK
  stale[me] = 0;
#endif
  if
  :: leading ->
lead:
    drive_once(me, x);
    if :: me == GIVES_UP -> late = 1 :: true fi;
    goto look
  :: else
  fi;
#if FOLLOWS < WAITERS
  if :: me == FOLLOWS -> goto follow :: else fi;
#endif
  atomic {
    try_drive(me, WAITER, x);
    if
    :: x == NOBODY ->
      leading = 1;
#ifdef MUT_LEADER_NO_LOOK
      goto lead
#else
      goto look                 /* the last driver may have served our event */
#endif
    :: else -> x = 0
    fi
  }

follow:
  increment(me, SLEEPERS);
  atomic {
    load(me, DRIVER, x);        /* whoever releases from here on sees that we sleep */
#ifdef MUT_FOLLOWER_NO_SECOND_LOOK
    if :: x == NOBODY -> x = WAITER :: else fi
#endif
  }
#if FOLLOWS < WAITERS
  if                            /* it has the thread drive, and never takes the lead from it */
#ifdef MUT_FOLLOWER_NO_ATTENTION
  :: atomic { me == FOLLOWS -> x = 0; goto sleep }
#else
  :: me == FOLLOWS && x == NOBODY -> attention(me, x); goto sleep
  :: atomic { me == FOLLOWS && x != NOBODY -> x = 0; goto sleep }
#endif
  :: else
  fi;
#endif
  if
  :: x == NOBODY -> goto awake
  :: x == WAITER
  :: x == THREAD ->
    exchange(me, YIELD, 1, x);
    if :: x == 0 -> doorbell = 1 :: else fi
  fi;
sleep:
  atomic {                      /* futex_wait(event_seq, seq): compare and queue are one step */
    x = 0;
    if :: !stale[me] -> asleep[me] = 1 :: else fi
  }
  if
  :: !asleep[me]
  :: atomic { me == GIVES_UP && asleep[me] -> asleep[me] = 0; late = 1 }
  fi;
awake:
  atomic { decrement(me, SLEEPERS); goto look }

leave:
  decrement(me, ARMED);
  if :: leading -> release_drive(me, x) :: else fi;

done:
  atomic {
    leading = 0;
    late = 0;
    want[me] = 0;
    if :: round < rounds(me) -> round++; goto again :: else -> round = 0 fi
  }
}

/* await word.reached(): the event loop sleeps in its selector until the Notifier is rung. */
proctype Async(byte me) {
  byte x;
  want[me] = 1;
  increment(me, NOTIFIERS);
  increment(me, ARMED);
look:
  atomic {
    load(me, WORD(me), x);
    if :: x >= want[me] -> x = 0; goto done :: else -> x = 0 fi
  }
  atomic { notified -> notified = 0; goto look }
done:
  decrement(me, ARMED);
  atomic { decrement(me, NOTIFIERS); want[me] = 0 }
}

/* Progress::thread_main() and park(). */
proctype Progress() {
  byte x;
#ifdef MUT_HAND_BACK_OR_OVER
  bool woke;
#endif

top:
  atomic { try_drive(T, THREAD, x); if :: x == NOBODY :: else -> x = 0; goto park fi }
drive:
  atomic { load(T, YIELD, x); if :: x == 0 :: else -> x = 0; goto yield fi }
  drive_once(T, x);
  goto drive;
yield:
#if JOBS
  atomic { load(T, URGENT, x); if :: x == 1 -> x = 0 :: else -> goto give fi }
  drive_once_now(T, x);
give:
#endif
  store(T, YIELD, 0);
#ifdef MUT_HAND_OVER_BEFORE_UNLOCK
  hand_over(T, x);
  unlock(T);
#else
  unlock(T);
  hand_over(T, x);
#endif

park:
  atomic { park_stale = 0; driven = 0 }
  store(T, PARK, PARKED);
#if JOBS
  called(T, x);
  if :: x == 1 -> x = 0; goto awake :: else fi;
#endif
  if                            /* futex_wait(park_word) for at most kParkNs */
  :: atomic { park_stale -> skip };
#if JOBS
      called(T, x);
      if :: x == 1 -> x = 0; goto awake :: else -> goto park fi
#else
      goto park
#endif
  :: true;
#if JOBS
      called(T, x);
      if :: x == 1 -> x = 0; goto awake :: else fi
#endif
  fi;
  atomic {
    load(T, DRIVER, x);
    if
    :: x == NOBODY && driven -> goto park       /* everything was looked at meanwhile */
    :: x == NOBODY && !driven -> goto awake
    :: else -> x = 0
    fi
  }
  if :: goto park :: true fi;   /* other leaders than before; or one stayed a whole period */

  park_stale = 0;
#ifdef MUT_PARK_RELAXED
  put(T, PARK, FOR_EVER);
#else
  store(T, PARK, FOR_EVER);
#endif
  atomic { load(T, DRIVER, x); if :: x == NOBODY -> goto park :: else -> x = 0 fi }
#if JOBS
  atomic { load(T, URGENT, x); if :: x == 1 -> x = 0; goto park :: else fi }
#endif
  atomic { if :: !park_stale -> park_asleep = 1 :: else fi }
  atomic { !park_asleep -> goto park }

awake:
  store(T, PARK, AWAKE);
  goto top
}

/* ---- the world outside ---- */

proctype Writer(byte i) {       /* ShmChannel::raise(): one process, one word, values 1..rounds */
  byte x;
  byte v = 1;
  do
  :: v <= rounds(i) ->
    put(WRITER(i), WORD(i), v);
    atomic {
#ifndef MUT_NO_WRITER_FENCE
      fence(WRITER(i));
#endif
      load(WRITER(i), ARMED, x)
    }
    if :: x > 0 -> atomic { x = 0; doorbell = 1 } :: else fi;
    v++
  :: else -> break
  od
}

proctype Bystander(byte i) {    /* e.g. Node::free(): makes a condition true, then notify() */
  byte x;
  byte v = 1;
  do
  :: v <= rounds(i) -> put(WRITER(i), WORD(i), v); notify(WRITER(i), x); v++
  :: else -> break
  od
}

proctype Poster(byte i) {       /* Progress::post() in another thread of the process */
  byte x;
  byte v = 1;
  do
  :: v <= rounds(i) -> atomic { jobs[i]++; v++ } attention(WRITER(i), x)
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

/* `timeout` holds when nothing can move any more: no store buffer, no timer. Then nobody may sleep
   whose word is there, nothing may wait to be served, and somebody must be listening. A parked
   progress thread with a timer can still move, so such states do not count. */
proctype Monitor() {
  byte waiting;
  atomic {
    timeout ->
    assert(!LOST(0) && !LOST(1) && !LOST(2));
    waiting = (want[0] != 0) + (want[1] != 0) + (want[2] != 0);
    assert(mem[ARMED] == waiting);
    if
    :: PROGRESS || waiting > 0 -> assert(drivers == 1); assert(!READY && !HAVE_JOBS)
    :: else
    fi
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
      if :: from(i) == OWN -> run Bystander(i); run Flush(WRITER(i)) :: else fi;
      if :: from(i) == JOB -> run Poster(i) :: else fi;
      i++
    :: else -> break
    od;
    if :: PROGRESS -> run Progress(); run Flush(T) :: else fi;
    run Net();
    run Monitor();
    i = 0
  }
}

#ifdef LIVENESS
/* Under weak fairness: what has happened is noticed, by each thread and each time. */
ltl noticed { [] (LOST(0) -> <> !LOST(0)) && [] (LOST(1) -> <> !LOST(1)) }
#endif
