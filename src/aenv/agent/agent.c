/* The agent of a second container: runs commands and moves files for whoever connects to its unix socket.
 *
 *     aenv-agent SOCKET [until-eof]
 *
 * SOCKET is a path, or fd:N for a socket that listens already.
 * It is the first process of an image that it knows nothing about: it needs no library, no shell, no privilege and
 * nothing writable but the socket's directory. One connection is one command or one file; what passes is a letter,
 * four bytes of length (the highest first) and at most 64 KiB of data, as in aenv/runtime/frames.py.
 *
 *     a  arguments, each ended by a zero byte           o  what it prints, or what the file holds
 *     v  variables, NAME=value or NAME to remove it     r  what it prints to its error stream
 *     d  directory                                      z  8 bytes: size of the file
 *     t  8 bytes: milliseconds that it may take         x  4 bytes: exit code, or minus the signal;
 *     p  rows and columns: give it a terminal              1 byte: whether its time was over
 *     s  run it                                         f  4 bytes: errno; 1 byte: what failed; words
 *     g  path: read it          m  4 bytes: mode
 *     u  path: write what comes as input to it
 *     i  input      e  end of input      w  rows and columns      k  1 byte: a signal
 *
 * All of it is one process, which no command can signal or trace where it is the first of its container. A client that
 * leaves ends its command. Memory is bounded: nothing is read that cannot be passed on. */
#include "agent.h"

#include <endian.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>

enum {
    MOST_CLIENTS = 1024,
    MOST_LEFT = 512,            /* pipes of ended commands that something in the background may still write to */
    MOST_TEXT = 4 << 20,        /* bytes of arguments and variables: more than the kernel takes */
    MOST_TEXTS = 32 << 20,      /* the same, of all clients together */
    LAST = 1 << 20,             /* bytes of each stream that are still read when the command itself has ended */
    TURNS = 16,                 /* pieces that a client may move before it is another's turn */
    BEGIN_MS = 30000,           /* in which a client must have said what it wants */
    LINGER_MS = 10000,          /* in which a client must leave when it has been answered, and a file without one end */
    STALL_MS = 20000,           /* that a file may take without moving */
    PAUSE_MS = 50,              /* between two looks at what the background writes */
    SWEEP_MS = 5,               /* between two looks for processes that are to be killed */
    SWEEP_MOST_MS = 5000,
    TERMINAL_MS = 200,          /* in which a terminal hands over what was printed last */
    GRACE_MS = 1000,            /* that commands get to end when the agent does */
    WORSE = 500,                /* how much rather the kernel ends a command than the agent when memory is short */
    WORST = 1000,
};

static struct client *clients[MOST_CLIENTS];
static int client_count;
static struct {
    int fd;
    int64_t quiet_until;
    struct pollfd *polled;
} left[MOST_LEFT];
static int left_count;
static size_t texts_held;
static int badness = -1; /* how likely the kernel ends this process when memory is short */
static int own_badness;
static struct rlimit files_allowed;
static char scratch[PIECE];

static int64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000 + time.tv_nsec / 1000000;
}

static void shut(int *fd) {
    if (*fd >= 0) close(*fd);
    *fd = -1;
}

static bool append(struct text *text, const char *data, size_t length) {
    if (text->length + length > MOST_TEXT || texts_held + length > MOST_TEXTS) return false;
    char *grown = realloc(text->data, text->length + length + 1);
    if (grown == NULL) return false;
    memcpy(grown + text->length, data, length);
    text->data = grown;
    text->length += length;
    text->data[text->length] = 0;
    texts_held += length;
    return true;
}

static void forget(struct text *text) {
    free(text->data);
    texts_held -= text->length;
    *text = (struct text){0};
}

/* Processes */

static void sweep(struct client *client) {
    client->sweeping = true;
    client->sweep_at = now();
    client->sweep_until = client->sweep_at + SWEEP_MOST_MS;
}

static void reap(void) {
    int status;
    for (pid_t pid; (pid = waitpid(-1, &status, WNOHANG | WUNTRACED)) > 0;)
        for (int n = 0; n < client_count; n++) {
            struct client *client = clients[n];
            if (client->pid != pid || client->exited || client->phase == SETUP) continue;
            if (WIFSTOPPED(status)) {
                if (client->kind != COMMAND) kill(pid, SIGCONT); /* no command has a say in how a file is moved */
                continue;
            }
            client->exited = client->ready = true;
            client->wait_status = status;
            client->ended_at = now();
        }
}

/* A child has what its parent has when it is made. */
static pid_t fork_worse(void) {
    if (badness >= 0) dprintf(badness, "%d", own_badness + WORSE < WORST ? own_badness + WORSE : WORST);
    pid_t pid = fork();
    int number = errno;
    if (badness >= 0 && pid != 0) dprintf(badness, "%d", own_badness);
    errno = number;
    return pid;
}

/* What is said to a client */

static void say(struct client *client, char letter, const void *data, size_t length) {
    uint32_t size = htobe32((uint32_t)length);
    client->out[0] = letter;
    memcpy(client->out + 1, &size, sizeof size);
    if (data != NULL) memcpy(client->out + HEAD, data, length);
    client->out_start = 0;
    client->out_end = HEAD + length;
}

static void linger(struct client *client) {
    client->phase = LINGERING;
    client->deadline = now() + LINGER_MS;
}

static void fail(struct client *client, int number, enum stage stage) {
    char data[5 + 128];
    uint32_t code = htobe32((uint32_t)number);
    memcpy(data, &code, sizeof code);
    data[4] = (char)stage;
    int length = snprintf(data + 5, sizeof data - 5, "%s", strerror(number));
    say(client, 'f', data, 5 + (size_t)length);
    linger(client);
}

/* As long as something of a file moves, it may take. */
static void moves(struct client *client) {
    if (client->kind != COMMAND) client->deadline = now() + STALL_MS;
}

static void launch(struct client *client, char **arguments) {
    int ours[3] = {-1, -1, -1}, theirs[3] = {-1, -1, -1}, status[2] = {-1, -1};
    bool ended = client->no_input;
    pid_t pid = -1;
    if ((client->terminal ? open_terminal : open_pipes)(client, ours, theirs) && pipe2(status, O_CLOEXEC) == 0)
        pid = fork_worse();
    if (pid == 0) live(client, arguments, theirs, status[1]);
    int number = errno;
    for (int n = 0; n < 3; n++) shut(&theirs[n]);
    shut(&status[1]);
    forget(&client->arguments);
    forget(&client->variables);
    forget(&client->directory);
    if (pid < 0) {
        for (int n = 0; n < 3; n++) shut(&ours[n]);
        shut(&status[0]);
        fail(client, number, START);
        return;
    }
    for (int n = 0; n < client_count; n++)
        if (clients[n]->pid == pid) clients[n]->sweeping = false; /* that number's former owner is no more */
    fcntl(status[0], F_SETFL, O_NONBLOCK);
    client->pid = pid;
    client->phase = RUNNING;
    client->status = status[0];
    client->input = ours[0];
    client->outputs[0] = ours[1];
    client->outputs[1] = ours[2];
    client->last[0] = client->last[1] = LAST;
    client->deadline = client->allowed ? now() + client->allowed : 0;
    moves(client);
    if (ended && !client->terminal) shut(&client->input);
}

static void run(struct client *client) {
    struct text *text = &client->arguments;
    size_t count = 0;
    for (size_t n = 0; n < text->length; n++) count += text->data[n] == 0;
    if (count == 0 || text->data[text->length - 1] != 0) {
        fail(client, EINVAL, BAD);
        return;
    }
    char **arguments = calloc(count + 1, sizeof *arguments);
    if (arguments == NULL) {
        fail(client, ENOMEM, START);
        return;
    }
    char *one = text->data;
    for (size_t n = 0; n < count; n++, one += strlen(one) + 1) arguments[n] = one;
    launch(client, arguments);
    free(arguments);
}

static void move_file(struct client *client, enum kind kind, const char *path, size_t length) {
    forget(&client->arguments);
    if (length == 0 || length >= PATH_MAX || memchr(path, 0, length) != NULL || client->terminal) {
        fail(client, length >= PATH_MAX ? ENAMETOOLONG : EINVAL, length >= PATH_MAX ? FILES : BAD);
        return;
    }
    if (!append(&client->arguments, path, length)) {
        fail(client, ENOMEM, START);
        return;
    }
    if (kind == WRITE) {
        void *shared = mmap(NULL, 1, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        if (shared == MAP_FAILED) {
            fail(client, ENOMEM, START);
            return;
        }
        client->whole = shared;
    }
    client->kind = kind;
    client->no_input = kind == READ;
    client->allowed = 0;
    launch(client, NULL);
}

/* What a client says */

static bool window_of(struct client *client, const char *data, size_t length) {
    uint16_t sizes[2];
    if (length != sizeof sizes) return false;
    memcpy(sizes, data, sizeof sizes);
    client->window = (struct winsize){.ws_row = be16toh(sizes[0]), .ws_col = be16toh(sizes[1])};
    return true;
}

/* What is wanted, frame by frame; an errno when it cannot be. */
static int prepare(struct client *client, char letter, const char *data, size_t length) {
    uint64_t number = 0;
    if (length <= sizeof number) memcpy((char *)&number + sizeof number - length, data, length);
    number = be64toh(number);
    switch (letter) {
    case 'a': return append(&client->arguments, data, length) ? 0 : E2BIG;
    case 'v': return append(&client->variables, data, length) ? 0 : E2BIG;
    case 'd':
        if (memchr(data, 0, length) != NULL) return EINVAL;
        return append(&client->directory, data, length) ? 0 : E2BIG;
    case 't': client->allowed = number < INT64_MAX / 4 ? (int64_t)number : 0; return length == 8 ? 0 : EINVAL;
    case 'm': client->mode = (mode_t)number, client->has_mode = true; return length == 4 ? 0 : EINVAL;
    case 'p': client->terminal = true; return window_of(client, data, length) ? 0 : EINVAL;
    case 'e': client->no_input = true; return 0;
    case 's': run(client); return 0;
    case 'g': move_file(client, READ, data, length); return 0;
    case 'u': move_file(client, WRITE, data, length); return 0;
    default: return EINVAL;
    }
}

static void pass_signal(struct client *client, int number) {
    pid_t group = client->pid;
    if (client->exited || client->kind != COMMAND || number < 1 || number > 64) return;
    if (client->terminal && (ioctl(client->outputs[0], TIOCGPGRP, &group) != 0 || group <= 1)) group = client->pid;
    kill(-group, number);
}

/* Input for the command; whether all of it is through. */
static bool feed(struct client *client, const char *data, size_t length) {
    while (client->input >= 0 && client->sent_of_frame < length) {
        ssize_t sent = write(client->input, data + client->sent_of_frame, length - client->sent_of_frame);
        if (sent > 0)
            client->sent_of_frame += (size_t)sent, moves(client);
        else if (errno == EAGAIN)
            return !(client->stuck = true);
        else if (errno != EINTR)
            shut(&client->input); /* it takes no more, and what comes is dropped */
    }
    client->stuck = false;
    client->sent_of_frame = 0;
    return true;
}

static void gone(struct client *client) {
    shut(&client->socket);
    if (client->phase == RUNNING && !client->exited) {
        if (client->kind == COMMAND) sweep(client);
        if (client->kind == READ) kill(client->pid, SIGKILL);
        if (client->kind == WRITE) { /* it takes away what it wrote so far */
            shut(&client->input);
            client->deadline = now() + LINGER_MS;
        }
    }
    client->phase = GONE;
}

/* The next frame, when there is a whole one; whether there was. */
static bool obey(struct client *client) {
    if (client->phase == LINGERING) client->in_start = client->in_end = 0;
    size_t there = client->in_end - client->in_start;
    if (there < HEAD) return false;
    char *frame = client->in + client->in_start, letter = frame[0];
    uint32_t length;
    memcpy(&length, frame + 1, sizeof length);
    length = be32toh(length);
    if (length <= PIECE && there < HEAD + length) return false;
    bool good = length <= PIECE;
    if (client->phase == SETUP) {
        int number = good ? prepare(client, letter, frame + HEAD, length) : EMSGSIZE;
        if (number != 0) fail(client, number, BAD);
    } else if (good) {
        char *data = frame + HEAD;
        if (letter == 'i' && !feed(client, data, length)) return false;
        if (letter == 'e' && client->terminal && !feed(client, "\4", 1)) return false;
        if (letter == 'e' && client->whole) *client->whole = true;
        if (letter == 'e' && !client->terminal) shut(&client->input);
        if (letter == 'w' && window_of(client, data, length) && client->terminal)
            ioctl(client->outputs[0], TIOCSWINSZ, &client->window);
        if (letter == 'k' && length == 1) pass_signal(client, (unsigned char)*data);
        good = strchr("iewk", letter) != NULL && letter != 0;
    }
    if (client->phase == LINGERING)
        client->in_start = client->in_end;
    else if (good)
        client->in_start += HEAD + length;
    else
        gone(client);
    return good && client->phase != LINGERING;
}

static bool blocked(const struct client *client) {
    return client->in_end - client->in_start == sizeof client->in;
}

static bool listen_to(struct client *client) {
    if (client->in_start > 0) {
        memmove(client->in, client->in + client->in_start, client->in_end - client->in_start);
        client->in_end -= client->in_start;
        client->in_start = 0;
    }
    if (blocked(client)) return false;
    size_t room = sizeof client->in - client->in_end;
    ssize_t length = recv(client->socket, client->in + client->in_end, room, MSG_DONTWAIT);
    if (length < 0 && (errno == EAGAIN || errno == EINTR)) return false;
    if (length <= 0) {
        gone(client);
        return false;
    }
    client->in_end += (size_t)length;
    return true;
}

static bool flush(struct client *client) {
    if (client->out_start == client->out_end) return false;
    ssize_t sent = send(client->socket, client->out + client->out_start, client->out_end - client->out_start,
                        MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent < 0 && (errno == EAGAIN || errno == EINTR)) return false;
    if (sent < 0) {
        gone(client);
        return false;
    }
    client->out_start += (size_t)sent;
    if (client->out_start == client->out_end) client->out_start = client->out_end = 0;
    return true;
}

/* Somebody in the background may still write to it, who shall neither wait nor break. */
static void let_go(struct client *client, int which) {
    if (client->outputs[which] >= 0 && !client->terminal && client->kind == COMMAND && left_count < MOST_LEFT) {
        left[left_count].fd = client->outputs[which];
        left[left_count].polled = NULL;
        left[left_count++].quiet_until = now() + PAUSE_MS;
        client->outputs[which] = -1;
    }
    shut(&client->outputs[which]);
}

static bool hear(struct client *client) {
    struct record record;
    ssize_t length = client->status < 0 ? -1 : read(client->status, &record, sizeof record);
    if (length == (ssize_t)sizeof record && record.what == 'z') {
        uint64_t size = htobe64(record.value);
        say(client, 'z', &size, sizeof size);
        return true;
    }
    if (length == (ssize_t)sizeof record) {
        client->failure = (int)record.value;
        client->failed_at = (enum stage)record.what;
    } else if (client->status >= 0 && (length == 0 || errno != EAGAIN)) {
        shut(&client->status);
    }
    return false;
}

/* The next thing for the client, when it has taken the one before. */
static bool collect(struct client *client) {
    if (client->phase != RUNNING || client->out_end > 0) return false;
    if (hear(client)) return true;
    bool over = client->exited && !client->sweeping;
    client->turn = !client->turn;
    for (int n = 0; n < 2; n++) {
        int which = n ^ client->turn, *fd = &client->outputs[which];
        if (*fd < 0) continue;
        ssize_t length = read(*fd, client->out + HEAD, PIECE);
        if (length > 0) {
            moves(client);
            say(client, which == 0 ? 'o' : 'r', NULL, (size_t)length);
            if (over && (client->last[which] -= length) <= 0 && client->kind == COMMAND) let_go(client, which);
            return true;
        }
        if (length == 0 || (errno != EAGAIN && errno != EINTR))
            shut(fd);
        else if (over && errno == EAGAIN && (!client->terminal || now() >= client->ended_at + TERMINAL_MS))
            let_go(client, which);
    }
    if (!over || client->status >= 0 || client->outputs[0] >= 0 || client->outputs[1] >= 0) return false;
    shut(&client->input);
    if (client->failed_at) {
        fail(client, client->failure, client->failed_at);
        return true;
    }
    int status = client->wait_status;
    int32_t code = WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
    char data[5];
    code = (int32_t)htobe32((uint32_t)code);
    memcpy(data, &code, sizeof code);
    data[4] = (char)client->timed_out;
    say(client, 'x', data, sizeof data);
    linger(client);
    return true;
}

static void serve(struct client *client) {
    bool moved = client->phase != GONE;
    client->ready = false;
    for (int turn = 0; moved && turn < TURNS; turn++) {
        moved = false;
        if (client->phase != GONE) moved |= listen_to(client);
        while (client->phase != GONE && obey(client)) moved = true;
        if (client->phase != GONE) moved |= collect(client);
        if (client->phase != GONE) moved |= flush(client);
    }
    client->ready = moved && client->phase != GONE; /* what it let go of last may have been all there was to wait for */
}

/* Time; false when the client is to be forgotten. */
static bool tend(struct client *client, int64_t time) {
    if (client->sweeping && time >= client->sweep_at) {
        client->sweep_at = time + SWEEP_MS;
        if (hunt(client->pid) == 0 || time >= client->sweep_until) client->sweeping = false, client->ready = true;
    }
    if (client->phase == LINGERING && client->out_end > 0) client->deadline = time + LINGER_MS; /* it reads slowly */
    if (client->phase == RUNNING && (client->kind == READ ? client->out_end > 0 : client->input >= 0 && !client->stuck))
        moves(client); /* it waits for its client */
    if (client->deadline && time >= client->deadline) {
        client->deadline = 0;
        bool mover = client->kind != COMMAND && client->pid && !client->exited;
        if (mover && client->phase == GONE) kill(client->pid, SIGKILL);
        if (client->phase == SETUP) fail(client, ETIMEDOUT, BAD);
        if (client->phase == LINGERING && client->deadline == 0) gone(client);
        if (mover && client->phase == RUNNING) {
            kill(client->pid, SIGKILL);
            fail(client, ETIMEDOUT, FILES);
        } else if (client->phase == RUNNING && !client->exited) {
            client->timed_out = true;
            sweep(client);
        }
    }
    if (client->phase != GONE || client->sweeping || (client->pid && !client->exited)) return true;
    for (int n = 0; n < 2; n++) let_go(client, n);
    return false;
}

static void release(struct client *client) {
    shut(&client->socket);
    shut(&client->input);
    shut(&client->status);
    forget(&client->arguments);
    forget(&client->variables);
    forget(&client->directory);
    if (client->whole) munmap((void *)client->whole, 1);
    free(client);
}

/* Whoever is in this container is a command, and has no business here. */
static bool welcome(int fd) {
    struct ucred peer;
    socklen_t length = sizeof peer;
    return getpid() != 1 || (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &length) == 0 && peer.pid == 0);
}

static bool receive(int door) {
    for (int n = 0; n < TURNS && client_count < MOST_CLIENTS; n++) {
        int fd = accept4(door, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (fd < 0) return errno == EAGAIN || errno == ECONNABORTED || errno == EINTR;
        struct client *client = welcome(fd) ? malloc(sizeof *client) : NULL;
        if (client == NULL) {
            close(fd);
            continue;
        }
        memset(client, 0, offsetof(struct client, in)); /* the buffers take no memory until they are used */
        client->socket = fd;
        client->files = files_allowed;
        client->input = client->status = client->outputs[0] = client->outputs[1] = -1;
        client->deadline = now() + BEGIN_MS;
        clients[client_count++] = client;
        serve(client);
    }
    return true;
}

static void drop_output(int64_t time) {
    for (int n = 0; n < left_count; n++) {
        if (left[n].polled == NULL || left[n].polled->revents == 0) continue;
        ssize_t length = read(left[n].fd, scratch, sizeof scratch);
        left[n].quiet_until = time + PAUSE_MS;
        if (length > 0 || (length < 0 && errno == EAGAIN)) continue;
        close(left[n].fd);
        left[n--] = left[--left_count];
    }
}

static void sooner(int64_t *wait, int64_t time, int64_t at) {
    int64_t distance = at > time ? at - time : 0;
    if (*wait < 0 || distance < *wait) *wait = distance;
}

static struct pollfd polled[4 + MOST_LEFT + 5 * MOST_CLIENTS];

/* One more place, where there is something to wait for: the kernel takes no more than a process may have open. */
static struct pollfd *watch(struct pollfd *next, int fd, int events) {
    if (fd < 0) return next;
    *next = (struct pollfd){.fd = fd, .events = (short)events};
    return next + 1;
}

/* Wait for something to do. The first three places are the door, the signals and standard input. */
static void rest(int door, int signals, int lifeline) {
    int64_t time = now(), wait = -1;
    struct pollfd *next = polled;
    *next++ = (struct pollfd){.fd = client_count < MOST_CLIENTS ? door : -1, .events = POLLIN};
    *next++ = (struct pollfd){.fd = signals, .events = POLLIN};
    *next++ = (struct pollfd){.fd = lifeline, .events = POLLIN};
    for (int n = 0; n < left_count; n++) {
        bool quiet = left[n].quiet_until > time;
        left[n].polled = quiet ? NULL : next;
        if (quiet) sooner(&wait, time, left[n].quiet_until);
        else next = watch(next, left[n].fd, POLLIN);
    }
    for (int n = 0; n < client_count; n++) {
        struct client *client = clients[n];
        client->polled = next;
        bool pending = client->out_end > 0;
        next = watch(next, client->socket, (blocked(client) ? 0 : POLLIN) | (pending ? POLLOUT : 0));
        if (client->phase == RUNNING) {
            if (client->stuck) next = watch(next, client->input, POLLOUT);
            if (!pending) {
                next = watch(next, client->status, POLLIN);
                next = watch(next, client->outputs[0], POLLIN);
                next = watch(next, client->outputs[1], POLLIN);
            }
            if (client->exited && client->terminal && !pending) {
                sooner(&wait, time, client->ended_at + TERMINAL_MS);
                if (time >= client->ended_at + TERMINAL_MS) client->ready = true;
            }
        }
        client->polled_end = next;
        if (client->deadline) sooner(&wait, time, client->deadline);
        if (client->sweeping) sooner(&wait, time, client->sweep_at);
        if (client->ready) sooner(&wait, time, time);
    }
    if (door < 0) sooner(&wait, time, time + PAUSE_MS); /* there was no room for another connection */
    if (poll(polled, (nfds_t)(next - polled), (int)(wait > 60000 ? 60000 : wait)) < 0)
        for (struct pollfd *one = polled; one < next; one++) one->revents = 0;
}

/* Whether a socket is meant that listens already. */
static bool is_given(const char *path) {
    return strncmp(path, "fd:", 3) == 0;
}

static _Noreturn void end(const char *path) {
    if (!is_given(path)) unlink(path);
    for (int n = 0; n < client_count; n++)
        if (clients[n]->phase == RUNNING && !clients[n]->exited) kill(-clients[n]->pid, SIGTERM);
    int64_t until = now() + GRACE_MS;
    struct timespec pause = {.tv_nsec = SWEEP_MS * 1000000L};
    while (waitpid(-1, NULL, WNOHANG) >= 0 && now() < until) nanosleep(&pause, NULL);
    for (until = now() + GRACE_MS; hunt(getpid()) > 0 && now() < until;) nanosleep(&pause, NULL);
    _exit(0);
}

static _Noreturn void refuse(const char *what) {
    fprintf(stderr, "aenv-agent: %s: %s\n", what, strerror(errno));
    exit(1);
}

static int open_door(const char *path) {
    if (is_given(path)) {
        int given = atoi(path + 3);
        if (fcntl(given, F_SETFD, FD_CLOEXEC) != 0 || fcntl(given, F_SETFL, O_NONBLOCK) != 0) refuse(path);
        return given;
    }
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    errno = ENAMETOOLONG;
    if (strlen(path) >= sizeof address.sun_path) refuse(path);
    memcpy(address.sun_path, path, strlen(path));
    int door = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    unlink(path);
    if (door < 0 || bind(door, (struct sockaddr *)&address, sizeof address) != 0 || chmod(path, 0666) != 0 ||
        listen(door, SOMAXCONN) != 0)
        refuse(path);
    return door;
}

/* Who cannot be traced has no say in this either, so it is opened before that. */
static void open_badness(void) {
    char found[16] = "";
    badness = open("/proc/self/oom_score_adj", O_RDWR | O_CLOEXEC);
    if (badness >= 0 && read(badness, found, sizeof found - 1) <= 0) shut(&badness);
    own_badness = atoi(found);
}

/* Whether a signal comes from outside the container, where this is its first process. A command can claim any code
 * below SI_USER (rt_sigqueueinfo), and have the kernel send those above it (F_SETSIG); SI_USER says who called kill. */
static bool from_outside(const struct signalfd_siginfo *seen) {
    return getpid() != 1 || (seen->ssi_pid == 0 && seen->ssi_code == SI_USER);
}

static bool has_ended(int lifeline) {
    ssize_t length = read(lifeline, scratch, sizeof scratch);
    return length == 0 || (length < 0 && errno != EAGAIN && errno != EINTR);
}

int main(int count, char **arguments) {
    if (count < 2 || count > 3 || (count == 3 && strcmp(arguments[2], "until-eof") != 0)) {
        fprintf(stderr, "usage: aenv-agent SOCKET [until-eof]\n");
        return 2;
    }
    for (int fd = 0; fd >= 0 && fd < 3;) { /* nothing of ours must come to lie where a command has its streams */
        fd = open("/dev/null", O_RDWR);
        if (fd >= 3) close(fd);
    }
    open_badness();
    prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
    prctl(PR_SET_DUMPABLE, 0, 0, 0, 0);
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0);
    getrlimit(RLIMIT_NOFILE, &files_allowed);
    setrlimit(RLIMIT_NOFILE, &(struct rlimit){.rlim_cur = files_allowed.rlim_max, .rlim_max = files_allowed.rlim_max});
    signal(SIGPIPE, SIG_IGN);
    sigset_t watched;
    sigemptyset(&watched);
    sigaddset(&watched, SIGCHLD);
    sigaddset(&watched, SIGTERM);
    sigaddset(&watched, SIGINT);
    sigprocmask(SIG_BLOCK, &watched, NULL);
    int signals = signalfd(-1, &watched, SFD_CLOEXEC | SFD_NONBLOCK), door = open_door(arguments[1]);
    if (signals < 0) refuse("signals");
    bool accepting = true;
    for (;;) {
        rest(accepting ? door : -1, signals, count == 3 ? 0 : -1);
        accepting = true;
        struct signalfd_siginfo seen;
        while (polled[1].revents && read(signals, &seen, sizeof seen) == (ssize_t)sizeof seen) {
            if (seen.ssi_signo == SIGCHLD) reap();
            else if (from_outside(&seen)) end(arguments[1]);
        }
        if (polled[2].revents && has_ended(0)) end(arguments[1]);
        int64_t time = now();
        drop_output(time);
        for (int n = client_count - 1; n >= 0; n--) {
            struct client *client = clients[n];
            for (struct pollfd *one = client->polled; one < client->polled_end; one++) {
                if (one->revents) client->ready = true;
                if (one->fd == client->socket && one->revents & (POLLHUP | POLLERR)) gone(client);
            }
            if (client->ready) serve(client);
            if (tend(client, time)) continue;
            release(client);
            clients[n] = clients[--client_count];
        }
        if (polled[0].revents) accepting = receive(door);
    }
}
