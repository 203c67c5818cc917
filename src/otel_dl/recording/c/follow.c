/* Follow: the calls of a builtin of somebody else's are followed, and nothing of it can be seen.
 *
 * A builtin that takes a tuple and a dict has no `vectorcall`; once it has one, CPython calls that
 * (PyObject_Vectorcall, PyObject_Call; 3.10 to 3.14). All else about the object stays: which it is, its type and
 * names, its method definition, of whose address its hash is made. One thing is lost: f(**{}) is f().
 *
 * `gate` says whether a call is worth a look. Then `begin` gets (args, kwargs or None) and returns None, or what is
 * called with (result, None) or (None, error) once the builtin has returned or raised. What these two raise is raised
 * (see `Patches.fault`), but for want of stack or memory.
 */

#include "native.h"

enum { FOLLOW_MOST = 8 };

typedef struct {
    PyObject_HEAD
    PyObject *function, *gate, *begin;
    char always; /* the gate is open whatever it says */
} Follow;

static Follow *follow_all[FOLLOW_MOST]; /* those in force, each with a reference */

static inline Follow *
follow_of(PyObject *function)
{
    for (int i = 0; i < FOLLOW_MOST; i++) {
        if (follow_all[i] != NULL && follow_all[i]->function == function)
            return follow_all[i];
    }
    return NULL;
}

/* As CPython calls a builtin that has no vectorcall. */
static PyObject *
follow_original(PyObject *function, PyObject *args, PyObject *kwargs)
{
    if (Py_EnterRecursiveCall(" while calling a Python object"))
        return NULL;
    PyObject *result = Py_TYPE(function)->tp_call(function, args, kwargs);
    Py_LeaveRecursiveCall();
    return result;
}

/* Whether what was raised is nobody's fault; then it is cleared. */
static int
follow_had_no_room(void)
{
    if (!PyErr_ExceptionMatches(PyExc_RecursionError) && !PyErr_ExceptionMatches(PyExc_MemoryError))
        return 0;
    PyErr_Clear();
    return 1;
}

/* What `begin` returned; None also where it was not called, NULL with an exception. */
static PyObject *
follow_begin(PyObject *function, PyObject *args, PyObject *kwargs)
{
    Follow *self = follow_of(function);
    if (self == NULL)
        return Py_NewRef(Py_None); /* another thread has just restored it */
    Py_INCREF(self);
    int open = self->always;
    PyObject *end = NULL;
    if (!open) {
        PyObject *yes = PyObject_CallNoArgs(self->gate);
        open = yes == Py_True;
        if (yes == NULL && !follow_had_no_room())
            goto done;
        Py_XDECREF(yes);
    }
    PyObject *given[] = {args, kwargs == NULL ? Py_None : kwargs};
    end = open ? PyObject_Vectorcall(self->begin, given, 2, NULL) : Py_NewRef(Py_None);
    if (end == NULL && follow_had_no_room())
        end = Py_NewRef(Py_None);
done:
    Py_DECREF(self);
    return end;
}

/* Tells `end` of `result`, NULL with an exception; returns the same. Takes the reference. */
static PyObject *
follow_end(PyObject *end, PyObject *result)
{
    PyObject *error = result == NULL ? take_exception() : NULL;
    PyObject *given[] = {result == NULL ? Py_None : result, error == NULL ? Py_None : error};
    PyObject *told = PyObject_Vectorcall(end, given, 2, NULL);
    if (told == NULL && !follow_had_no_room()) {
        Py_XDECREF(result);
        if (error != NULL) {
            PyObject *raised = take_exception();
            PyException_SetContext(raised, error);
            put_exception(raised);
        }
        return NULL;
    }
    Py_XDECREF(told);
    if (error != NULL)
        put_exception(error);
    return result;
}

static PyObject *
follow_call(PyObject *function, PyObject *const *stack, size_t nargsf, PyObject *names)
{
    Py_ssize_t count = PyVectorcall_NARGS(nargsf);
    PyObject *result = NULL, *end = NULL, *kwargs = NULL, *args = PyTuple_New(count);
    if (args == NULL)
        return NULL;
    for (Py_ssize_t i = 0; i < count; i++)
        PyTuple_SET_ITEM(args, i, Py_NewRef(stack[i]));
    Py_ssize_t named = names == NULL ? 0 : PyTuple_GET_SIZE(names);
    if (named && (kwargs = PyDict_New()) == NULL)
        goto done;
    for (Py_ssize_t i = 0; i < named; i++) {
        if (PyDict_SetItem(kwargs, PyTuple_GET_ITEM(names, i), stack[count + i]) < 0)
            goto done;
    }
    end = follow_begin(function, args, kwargs);
    if (end != NULL) {
        result = follow_original(function, args, kwargs);
        if (end != Py_None)
            result = follow_end(end, result);
    }
done:
    Py_XDECREF(end);
    Py_XDECREF(kwargs);
    Py_DECREF(args);
    return result;
}

static PyObject *
follow_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"function", "gate", "begin", NULL};
    PyObject *function, *gate, *begin;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!OO", keywords, &PyCFunction_Type, &function, &gate, &begin))
        return NULL;
    int flags = PyCFunction_GET_FLAGS(function) & (METH_VARARGS | METH_KEYWORDS | METH_FASTCALL | METH_O | METH_NOARGS);
    if (!PyCFunction_CheckExact(function) || flags != (METH_VARARGS | METH_KEYWORDS)
        || ((PyCFunctionObject *)function)->vectorcall != NULL) {
        PyErr_SetString(PyExc_TypeError, "it is no builtin that takes a tuple and a dict, or is followed already");
        return NULL;
    }
    int free = 0;
    while (free < FOLLOW_MOST && follow_all[free] != NULL)
        free++;
    if (free == FOLLOW_MOST) {
        PyErr_SetString(PyExc_ValueError, "so many can't be followed");
        return NULL;
    }
    Follow *self = (Follow *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->function = Py_NewRef(function);
    self->gate = Py_NewRef(gate);
    self->begin = Py_NewRef(begin);
    follow_all[free] = (Follow *)Py_NewRef((PyObject *)self);
    ((PyCFunctionObject *)function)->vectorcall = follow_call;
    return (PyObject *)self;
}

/* Calls that are open, and this may be called from one, go on to their end. Another one's is left alone. */
static PyObject *
follow_restore(Follow *self, PyObject *Py_UNUSED(ignored))
{
    for (int i = 0; i < FOLLOW_MOST; i++) {
        if (follow_all[i] == self) {
            PyCFunctionObject *function = (PyCFunctionObject *)self->function;
            if (function->vectorcall == follow_call)
                function->vectorcall = NULL;
            follow_all[i] = NULL;
            Py_DECREF(self);
        }
    }
    Py_RETURN_NONE;
}

static PyMemberDef follow_members[] = {{"always", T_BOOL, offsetof(Follow, always), 0, NULL}, {NULL}};

static PyMethodDef follow_methods[] = {{"restore", (PyCFunction)follow_restore, METH_NOARGS, NULL}, {NULL}};

static int
follow_traverse(Follow *self, visitproc visit, void *arg)
{
    Py_VISIT(self->function);
    Py_VISIT(self->gate);
    Py_VISIT(self->begin);
    return 0;
}

static void
follow_dealloc(Follow *self)
{
    PyObject_GC_UnTrack(self);
    Py_XDECREF(self->function);
    Py_XDECREF(self->gate);
    Py_XDECREF(self->begin);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

PyTypeObject FollowType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "otel_dl.recording._native.Follow",
    .tp_basicsize = sizeof(Follow),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = follow_new,
    .tp_members = follow_members,
    .tp_methods = follow_methods,
    .tp_traverse = (traverseproc)follow_traverse,
    .tp_dealloc = (destructor)follow_dealloc,
};
