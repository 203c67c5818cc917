/* Forward: a call of a module is a forward, or one within it. */

#include "native.h"

/* Whether an attribute is true, or has entries; -1 with an exception set. */
static int
is_true(PyObject *module, PyObject *name)
{
    PyObject *value = PyObject_GetAttr(module, name);
    if (value == NULL)
        return -1;
    int answer = PyObject_IsTrue(value);
    Py_DECREF(value);
    return answer;
}

/* Which kind of forward a call of `module` is (borrowed), NULL with an exception set. */
static PyObject *
forward_kind(Hook *hook, PyObject *module)
{
    int training = is_true(module, str_training);
    if (training < 0)
        return NULL;
    if (training) {
        PyObject *answer = PyObject_CallNoArgs(hook->is_grad_enabled);
        if (answer == NULL)
            return NULL;
        training = PyObject_IsTrue(answer);
        Py_DECREF(answer);
        if (training < 0)
            return NULL;
    }
    if (!training)
        return hook->eval_kind;
    int some = is_true(module, str_modules);
    if (some == 0)
        some = is_true(module, str_parameters);
    return some < 0 ? NULL : some ? hook->kind : hook->neutral_kind;
}

PyObject *
forward_call(Hook *hook, PyObject *const *args, size_t nargsf, PyObject *kwnames)
{
    Lane *lane = followed(hook->fast);
    if (lane == NULL || PyVectorcall_NARGS(nargsf) < 1)
        return PyObject_Vectorcall(hook->recorded, args, nargsf, kwnames);
    PyObject *module = args[0];
    if (lane->kinds & FORWARD) {
        /* A submodule's call, the hot one (hundreds a step). Where torch's own function stands, its two lines are done
         * here: one frame less (torch/nn/modules/module.py::_wrapped_call_impl, 2.4 to 2.15). */
        if (hook->own) {
            PyObject *compiled = PyObject_GetAttr(module, str_compiled_call_impl);
            if (compiled == Py_None) {
                Py_DECREF(compiled);
                return PyObject_VectorcallMethod(str_call_impl, args, nargsf, kwnames);
            }
            if (compiled == NULL && !no_attribute())
                return NULL;
            Py_XDECREF(compiled);
        }
        return PyObject_Vectorcall(hook->original, args, nargsf, kwnames);
    }
    Step *step = ordinary(hook->fast, lane);
    if (step == NULL)
        return PyObject_Vectorcall(hook->recorded, args, nargsf, kwnames);
    Py_INCREF(lane);
    Py_INCREF(step);
    PyObject *kind = forward_kind(hook, module);
    /* Attributes of a module may be anything, and looking at them may have done anything. */
    if (kind == NULL || lane->step != (PyObject *)step || lane->kinds) {
        Py_DECREF(step);
        Py_DECREF(lane);
        if (kind == NULL && !no_attribute())
            return NULL;
        return PyObject_Vectorcall(hook->recorded, args, nargsf, kwnames);
    }
    return call_phase(hook, lane, step, kind, PyLong_AsLong(kind), module, args, nargsf, kwnames);
}
