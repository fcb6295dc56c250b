/* Which processes belong to a command, and their end. */
#include "agent.h"

#include <dirent.h>

enum { MOST_PROCESSES = 16 * 1024 };

struct process {
    pid_t pid, parent, group, session;
    bool dead, wanted;
};

static int by_pid(const void *one, const void *other) {
    const struct process *a = one, *b = other;
    return (a->pid > b->pid) - (a->pid < b->pid);
}

static size_t list_processes(struct process *found) {
    DIR *directory = opendir("/proc");
    if (directory == NULL) return 0;
    size_t count = 0;
    for (struct dirent *entry; count < MOST_PROCESSES && (entry = readdir(directory)) != NULL;) {
        if (entry->d_name[0] < '1' || entry->d_name[0] > '9') continue;
        char path[300], stat[512];
        snprintf(path, sizeof path, "/proc/%s/stat", entry->d_name);
        int fd = open(path, O_RDONLY | O_CLOEXEC);
        if (fd < 0) continue;
        ssize_t length = read(fd, stat, sizeof stat - 1);
        close(fd);
        if (length <= 0) continue;
        stat[length] = 0;
        char *rest = strrchr(stat, ')'), state; /* a process chooses its name: what follows it is the kernel's */
        struct process *process = &found[count];
        if (rest == NULL || sscanf(rest + 1, " %c %d %d %d", &state, &process->parent, &process->group,
                                   &process->session) != 4)
            continue;
        process->pid = atoi(entry->d_name);
        process->dead = state == 'Z' || state == 'X';
        process->wanted = false;
        count++;
    }
    closedir(directory);
    qsort(found, count, sizeof *found, by_pid);
    return count;
}

int hunt(pid_t leader) {
    static struct process found[MOST_PROCESSES];
    pid_t self = getpid();
    if (leader != self) kill(-leader, SIGSTOP); /* whose parents die belongs to nobody: first they are found */
    size_t count = list_processes(found);
    for (size_t n = 0; n < count; n++) {
        struct process *one = &found[n];
        one->wanted = one->pid == leader || (leader != self && (one->session == leader || one->group == leader));
    }
    for (bool more = true; more;) {
        more = false;
        for (size_t n = 0; n < count; n++) {
            struct process *one = &found[n], key = {.pid = one->parent};
            if (one->wanted) continue;
            struct process *parent = bsearch(&key, found, count, sizeof *found, by_pid);
            if (parent != NULL && parent->wanted) one->wanted = more = true;
        }
    }
    int alive = 0;
    if (leader != self) kill(-leader, SIGKILL);
    for (size_t n = 0; n < count; n++) {
        if (!found[n].wanted || found[n].dead || found[n].pid == self) continue;
        kill(found[n].pid, SIGKILL);
        alive++;
    }
    return alive;
}
