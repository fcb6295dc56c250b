/* What a child does: becomes a command, or moves a file. It tells what went wrong by a pipe. */
#include "agent.h"

#include <sys/syscall.h>

enum {
    MOST_FILES = 8192, /* that the agent may have open */
    MOST_LINKS = 40,   /* as the kernel has it */
};

static char piece[PIECE];

static void tell(int status, char what, uint64_t value) {
    struct record record = {.what = what, .value = value};
    if (write(status, &record, sizeof record) < 0) _exit(127);
}

static _Noreturn void give_up(int status, enum stage stage) {
    tell(status, (char)stage, (uint64_t)errno);
    _exit(127);
}

static void become(struct client *client, char **arguments, const int *ends, int status) {
    for (int n = 0; n < 3; n++)
        if (dup2(ends[n], n) < 0) give_up(status, START);
    if (client->terminal) ioctl(0, TIOCSCTTY, 0);
    setrlimit(RLIMIT_NOFILE, &client->files);
    char *end = client->variables.data + client->variables.length;
    for (char *one = client->variables.data; one < end; one += strlen(one) + 1)
        if (*one != 0 && *one != '=' && (strchr(one, '=') ? putenv(one) : unsetenv(one)) != 0) give_up(status, START);
    if (getenv("PATH") == NULL) putenv("PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin");
    if (client->directory.length && chdir(client->directory.data) != 0) give_up(status, DIRECTORY);
    execvp(arguments[0], arguments);
    give_up(status, PROGRAM);
}

static void read_file(const char *path, int status) {
    struct stat found;
    int file = open(path, O_RDONLY | O_NONBLOCK | O_NOCTTY);
    if (file < 0 || fstat(file, &found) != 0) give_up(status, FILES);
    errno = S_ISDIR(found.st_mode) ? EISDIR : ENXIO;
    if (!S_ISREG(found.st_mode)) give_up(status, FILES);
    tell(status, 'z', (uint64_t)found.st_size);
    for (ssize_t length; (length = read(file, piece, sizeof piece)) != 0;) {
        if (length < 0) give_up(status, FILES);
        for (ssize_t sent = 0, more; sent < length; sent += more)
            if ((more = write(1, piece + sent, (size_t)(length - sent))) < 0) give_up(status, FILES);
    }
}

/* Follow a link to what it means, which need not be there; whether that goes. */
static bool follow(char *path) {
    struct stat found;
    for (int links = 0; lstat(path, &found) == 0 && S_ISLNK(found.st_mode); links++) {
        char target[PATH_MAX];
        ssize_t length = readlink(path, target, sizeof target);
        if (length < 0) return false;
        char *name = strrchr(path, '/');
        size_t folder = name == NULL || target[0] == '/' ? 0 : (size_t)(name - path) + 1;
        errno = links == MOST_LINKS ? ELOOP : ENAMETOOLONG;
        if (links == MOST_LINKS || folder + (size_t)length >= PATH_MAX) return false;
        memcpy(path + folder, target, (size_t)length);
        path[folder + (size_t)length] = 0;
    }
    return true;
}

static bool names_directory(const char *path) {
    const char *slash = strrchr(path, '/'), *name = slash == NULL ? path : slash + 1;
    return *name == 0 || strcmp(name, ".") == 0 || strcmp(name, "..") == 0;
}

static void write_file(const char *given, const struct client *client, int status) {
    char path[PATH_MAX], temporary[PATH_MAX];
    struct stat found;
    if (!follow(strcpy(path, given))) give_up(status, FILES);
    bool there = lstat(path, &found) == 0;
    errno = names_directory(path) || (there && S_ISDIR(found.st_mode)) ? EISDIR : ENXIO;
    if (errno == EISDIR || (there && !S_ISREG(found.st_mode))) give_up(status, FILES);
    char *name = strrchr(path, '/');
    for (char *slash = path + 1; name != NULL && slash <= name; slash++) {
        if (*slash != '/') continue;
        *slash = 0;
        if (mkdir(path, 0777) != 0 && errno != EEXIST) give_up(status, FILES);
        *slash = '/';
    }
    int folder = name == NULL ? 0 : (int)(name - path) + 1;
    errno = ENAMETOOLONG;
    if (snprintf(temporary, sizeof temporary, "%.*s.aenv-%d", folder, path, getpid()) >= (int)sizeof temporary)
        give_up(status, FILES);
    unlink(temporary); /* of one that had this number before, and was killed */
    int file = open(temporary, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW, 0666);
    if (file < 0) give_up(status, FILES);
    for (ssize_t length; (length = read(0, piece, sizeof piece)) != 0;) {
        ssize_t kept = 0;
        for (ssize_t more; kept < length; kept += more)
            if ((more = write(file, piece + kept, (size_t)(length - kept))) < 0) break;
        if (length < 0 || kept < length) goto undo;
    }
    errno = ECANCELED;
    if (!*client->whole) goto undo;
    if (client->has_mode && fchmod(file, client->mode & 0777) != 0) goto undo;
    if (!client->has_mode && there && fchmod(file, found.st_mode & 0777) != 0) goto undo;
    if (close(file) == 0 && rename(temporary, path) == 0) return;
undo:;
    int number = errno;
    unlink(temporary);
    errno = number;
    give_up(status, FILES);
}

/* With no room for who sent a signal, the kernel delivers it as if from outside: children cannot fill the agent's. */
static void spare_signals(void) {
    struct rlimit pending;
    if (getrlimit(RLIMIT_SIGPENDING, &pending) != 0) return;
    pending.rlim_cur = pending.rlim_max = pending.rlim_cur / 2;
    setrlimit(RLIMIT_SIGPENDING, &pending);
}

/* The child: nothing of the agent's is left to it but what it needs. */
_Noreturn void live(struct client *client, char **arguments, const int *ends, int status) {
    setsid();
    spare_signals();
    sigset_t none;
    sigemptyset(&none);
    for (int number = 1; number < NSIG; number++)
        signal(number, SIG_DFL); /* what the agent ignores, and what whoever started it ignored */
    if (client->kind == COMMAND) {
        sigprocmask(SIG_SETMASK, &none, NULL);
        become(client, arguments, ends, status);
    }
    if (dup2(ends[0], 0) < 0 || dup2(ends[1], 1) < 0 || dup2(status, 3) < 0) give_up(status, START);
    if (syscall(SYS_close_range, 4U, ~0U, 0U) != 0) /* a pipe of another's that stays open here has no end there */
        for (int fd = 4; fd < MOST_FILES; fd++) close(fd);
    const char *path = client->arguments.data;
    sigprocmask(SIG_SETMASK, &none, NULL);
    if (client->kind == READ)
        read_file(path, 3);
    else
        write_file(path, client, 3);
    _exit(0);
}

bool open_terminal(struct client *client, int *ours, int *theirs) {
    int terminal = posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC | O_NONBLOCK);
    if (terminal < 0) return false;
    ours[0] = terminal;
    ioctl(terminal, TIOCSWINSZ, &client->window);
    if (unlockpt(terminal) != 0 || (ours[1] = fcntl(terminal, F_DUPFD_CLOEXEC, 3)) < 0) return false;
    theirs[0] = ioctl(terminal, TIOCGPTPEER, O_RDWR | O_NOCTTY | O_CLOEXEC);
    if (theirs[0] < 0) return false;
    theirs[1] = fcntl(theirs[0], F_DUPFD_CLOEXEC, 3);
    theirs[2] = fcntl(theirs[0], F_DUPFD_CLOEXEC, 3);
    return theirs[1] >= 0 && theirs[2] >= 0;
}

bool open_pipes(struct client *client, int *ours, int *theirs) {
    int ends[2];
    if (client->no_input && (theirs[0] = open("/dev/null", O_RDONLY | O_CLOEXEC)) < 0) client->no_input = false;
    for (int n = client->no_input ? 1 : 0; n < 3; n++) {
        if (pipe2(ends, O_CLOEXEC) != 0) return false;
        ours[n] = n == 0 ? ends[1] : ends[0];
        theirs[n] = n == 0 ? ends[0] : ends[1];
        fcntl(ours[n], F_SETFL, O_NONBLOCK);
    }
    return true;
}
