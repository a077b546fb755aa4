"""What an operator's machine is and does, before engines start on it: ``kvconn doctor``.

Rules
1. A probe is two functions: ``gather`` touches the machine and answers with frozen facts, ``judge`` turns facts into
   findings and touches nothing. So every finding is testable on a machine that does not have the fault.
2. What may hang, abort or be killed (UCX, CUDA, a dead network file system) is asked in a child with a deadline
   (:mod:`kvconn.doctor.children`); how the child ended is a fact like any other.
3. A finding is ``fail`` only for what would break an engine or hand out wrong answers; what is slow or fragile is
   ``warn``. Speed alone never fails.
"""
